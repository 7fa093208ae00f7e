// Trajectories to read: what the environment wrote is grey, what the policy sampled is marked token by token.

const SURPRISE = 3; // nats at which a token is fully marked: probability 5 %

function tokenStyle(node, logprob, version, by) {
  if (by === "version") node.style.background = `color-mix(in srgb, var(--v${version % 4}) 38%, transparent)`;
  else if (logprob === null) node.style.background = "";
  else {
    const share = Math.min(1, -logprob / SURPRISE);
    node.style.background = `color-mix(in srgb, color-mix(in srgb, var(--t1) ${Math.round(100 * share)}%, var(--t2)) ${Math.round(28 + 47 * share)}%, transparent)`;
  }
}

function reading(host, item, tokens) {
  const card = element("article", "", host), head = element("header", "", card);
  element("span", "", head, item.when);
  element("span", "reward", head, item.reward === null ? "no reward" : `reward ${short(item.reward)}`);
  const spans = item.spans.map(([version, n]) => `${n} under v${version}`).join(", ");
  const facts = [`${item.turns} turn${item.turns === 1 ? "" : "s"}`, `${item.sampled} sampled tokens`, spans];
  if (item.staleness !== null) facts.push(`staleness ${item.staleness}`);
  if (item.bad_actions) facts.push(`${item.bad_actions} unreadable`);
  if (item.seconds) facts.push(item.seconds >= 1 ? `${item.seconds.toPrecision(3)} s` : `${Math.round(item.seconds * 1000)} ms`);
  facts.push(item.cause.replaceAll("_", " "));
  element("p", "meta", card, facts.filter(Boolean).join(" · ")).title = `${item.id}, attempt ${item.attempt}`;
  const text = element("pre", "", card);
  for (const run of item.runs) {
    if (run[0] === 0) { text.append(run[1]); continue; }
    run[1].forEach((piece, index) => {
      const token = element("span", "", text, piece.replace(/\n$/, "↵"));
      token.dataset.token = tokens.push([token, run[2][index], run[3][index]]) - 1;
      if (piece.endsWith("\n")) text.append("\n");
    });
  }
}

function setUpReader() {
  const host = document.getElementById("readings");
  if (!host || !data.readings.length) return;
  const tokens = [], tools = element("div", "tools", host);
  const paint = (by) => tokens.forEach(([node, logprob, version]) => tokenStyle(node, logprob, version, by));
  element("span", "", tools, "Colour sampled tokens by");
  const buttons = ["probability", "version"].map((by) => {
    const button = element("button", "", tools, by);
    button.type = "button";
    button.addEventListener("click", () => { buttons.forEach((other) => other.setAttribute("aria-pressed", other === button)); paint(by); });
    return button;
  });
  const scale = element("span", "", tools);
  scale.append("likely");
  element("i", "scale", scale);
  scale.append("unlikely (5 % or less)");
  const groups = element("div", "tasks", host);
  data.tasks.forEach((task, index) => {
    const items = data.readings.filter((item) => item.task === task);
    if (!items.length) return;
    const title = element("h3", "", groups);
    element("i", `dot t${index % 6}`, title);
    title.append(task);
    const grid = element("div", "reading", groups);
    items.forEach((item) => reading(grid, item, tokens));
  });
  groups.addEventListener("pointermove", (event) => {
    const entry = tokens[event.target.dataset?.token];
    if (!entry) { tip.hidden = true; return; }
    const [node, logprob, version] = entry;
    const chance = logprob === null ? "" : `probability ${short(Math.exp(logprob))} (log ${logprob})`;
    showTip(event, [[`“${node.textContent}”`, true], [chance], [`sampled under v${version}`]]);
  });
  groups.addEventListener("pointerleave", () => { tip.hidden = true; });
  buttons[0].click();
}

setUpCharts();
setUpTimeline();
setUpReader();
