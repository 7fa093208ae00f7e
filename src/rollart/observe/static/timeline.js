// The last steps on a canvas: trainer, weights, engines, environments, and every trajectory, to zoom and drag.

const LANE_GAP = 14, LABEL = 118, AXIS = 22;

function lanesOf(view) {
  const lanes = [{ kind: "trainer", name: "trainer", height: 28 }];
  const names = Object.keys(view.versions);
  names.forEach((name) => lanes.push({ kind: "weights", name: names.length > 1 ? `weights ${name}` : "weights served", engine: name, height: 18 }));
  Object.keys(view.engines).forEach((name) => lanes.push({ kind: "load", name: names.length > 1 ? name : "engine", note: "live requests", values: view.engines[name], height: 64 }));
  lanes.push({ kind: "load", name: "environments", note: "stepping", values: view.envs, height: 44 });
  const rows = 1 + view.trajectories.reduce((most, [row]) => Math.max(most, row), 0);
  const pitch = Math.max(2, Math.min(7, Math.floor(420 / rows)));
  const share = view.shown[0] < view.shown[1] ? `${view.shown[0]} of ${view.shown[1]}` : `${view.shown[1]} drawn`;
  lanes.push({ kind: "trajectories", name: "trajectories", note: share, rows, pitch, height: rows * pitch });
  let top = AXIS;
  for (const lane of lanes) { lane.top = top; top += lane.height + LANE_GAP; }
  return [lanes, top];
}

function setUpTimeline() {
  const view = data.window, host = document.getElementById("canvas");
  if (!host || !view) return;
  const canvas = element("canvas", "", host), pen = canvas.getContext("2d");
  const [lanes, height] = lanesOf(view);
  let from = 0, to = view.length, width = 0;
  const x = (tick) => LABEL + (tick - from) / (to - from) * (width - LABEL);
  const tickAt = (px) => from + (px - LABEL) / (width - LABEL) * (to - from);
  const ms = (ticks) => { const value = ticks * view.tick_s; return value >= 1 ? `${value.toPrecision(3)} s` : `${+(value * 1000).toPrecision(3)} ms`; };
  const version = (number) => color(`--v${((number % 4) + 4) % 4}`);

  function bar(start, end, top, size, fill, least = 0.6) {
    const left = Math.max(LABEL, x(start)), right = Math.min(width, Math.max(x(end), x(start) + least));
    if (right > left) { pen.fillStyle = fill; pen.fillRect(left, top, right - left, size); }
    return [left, right];
  }
  function label(text, left, right, middle, fill) {
    pen.font = "600 11px " + color("--sans");
    if (pen.measureText(text).width + 10 < right - left) { pen.fillStyle = fill; pen.fillText(text, left + 6, middle); }
  }
  const paint = {
    trainer(lane) {
      const size = lane.height - 6;
      for (const [start, end] of view.waits) bar(start, end, lane.top + size / 2 - 4, 8, color("--wait"));
      for (const [start, end, step] of view.steps) {
        const [left, right] = bar(start, end, lane.top, size, color("--accent"));
        label(`step ${step}`, left, right, lane.top + size / 2, "#fff");
      }
      for (const [start, end] of view.publishes) bar(start, end, lane.top + size + 1, 4, color("--v2"), 2);
    },
    weights(lane) {
      const marks = view.versions[lane.engine];
      marks.forEach(([tick, number], index) => {
        const end = index + 1 < marks.length ? marks[index + 1][0] : view.length;
        if (end < from || tick > to) return;
        const [left, right] = bar(Math.max(tick, 0), Math.min(end, view.length), lane.top, lane.height, version(number));
        label(`v${number}`, left, right, lane.top + lane.height / 2, "#fff");
      });
    },
    load(lane) {
      const n = lane.values[0].length, top = lane.values[0].map((_, at) => lane.values.reduce((sum, row) => sum + row[at], 0));
      lane.most = Math.max(1, ...top);
      const floor = lane.top + lane.height, scale = lane.height / lane.most, base = new Array(n).fill(0);
      const visible = (at) => (at + 1) * view.length / n >= from && at * view.length / n <= to;
      lane.values.forEach((row, task) => {
        pen.fillStyle = color(`--t${task % 6}`);
        for (let at = 0; at < n; at += 1) {
          if (row[at] && visible(at)) {
            const left = Math.max(LABEL, x(at * view.length / n)), right = Math.min(width, x((at + 1) * view.length / n) + 0.4);
            pen.fillRect(left, floor - (base[at] + row[at]) * scale, right - left, row[at] * scale);
          }
          base[at] += row[at];
        }
      });
      pen.fillStyle = color("--rule");
      pen.fillRect(LABEL, floor, width - LABEL, 1);
    },
    trajectories(lane) {
      const size = lane.pitch > 3 ? lane.pitch - 1 : lane.pitch - 0.4;
      for (const [row, start, end, task, , , parts] of view.trajectories) {
        const stop = end === null ? view.length : end;
        if (stop < from || start > to) continue;
        const top = lane.top + row * lane.pitch;
        pen.globalAlpha = 0.3;
        bar(start, stop, top, size, color(`--t${task % 6}`));
        pen.globalAlpha = 1;
        for (let at = 0; at < parts.length; at += 3) {
          if (parts[at + 1] >= from && parts[at] <= to && parts[at + 2] >= 0) bar(parts[at], parts[at + 1], top, size, version(parts[at + 2]));
        }
      }
    },
  };

  function draw() {
    const scale = devicePixelRatio || 1;
    width = host.clientWidth;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    const ticks = niceTicks(view.t0 + from * view.tick_s, view.t0 + to * view.tick_s, Math.max(2, width / 130));
    const step = ticks[1] - ticks[0] || 1;
    const digits = [0, 1, 2, 3, 4].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 5;
    for (const tick of ticks) {
      const at = x((tick - view.t0) / view.tick_s);
      pen.fillStyle = color("--grid"); pen.fillRect(at, AXIS - 4, 1, height);
      pen.font = "11px " + color("--sans"); pen.fillStyle = color("--soft");
      const text = `${tick.toFixed(digits)} s`, half = pen.measureText(text).width / 2;
      if (at - half > LABEL - 20 && at + half < width) pen.fillText(text, at - half, 8);
    }
    for (const lane of lanes) paint[lane.kind](lane);
    for (const lane of lanes) {
      pen.clearRect(0, lane.top, LABEL - 1, lane.height + 2);
      pen.fillStyle = color("--ink"); pen.font = "600 12px " + color("--sans");
      const middle = lane.top + Math.min(lane.height / 2, 12);
      pen.fillText(lane.name, 0, middle, LABEL - 10);
      pen.font = "11px " + color("--sans"); pen.fillStyle = color("--soft");
      if (lane.note) pen.fillText(lane.note, 0, middle + 16, LABEL - 10);
      if (lane.kind === "load") { const most = `max ${short(lane.most)}`; pen.fillText(most, 0, middle + 31, LABEL - 10); }
    }
  }

  function zoom(factor, centre) {
    const length = Math.min(view.length, Math.max(50, (to - from) * factor));
    const share = (centre - from) / (to - from);
    from = Math.max(0, Math.min(view.length - length, centre - share * length));
    to = from + length;
    draw();
  }
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => {
    if (button.dataset.zoom === "all") { from = 0; to = view.length; draw(); } else zoom(Number(button.dataset.zoom), (from + to) / 2);
  }));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, tickAt(event.offsetX));
  }, { passive: false });
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = [event.clientX, from]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grip = null; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", (event) => {
    if (grip) {
      const length = to - from;
      from = Math.max(0, Math.min(view.length - length, grip[1] - (event.clientX - grip[0]) / (width - LABEL) * length));
      to = from + length;
      draw();
      return;
    }
    const lines = event.offsetX > LABEL ? describe(tickAt(event.offsetX), event.offsetY) : [];
    if (lines.length) showTip(event, lines); else tip.hidden = true;
  });

  function describe(tick, top) {
    const lane = lanes.find((candidate) => top >= candidate.top && top <= candidate.top + candidate.height);
    if (!lane) return [];
    const inside = (items) => items.find(([start, end]) => tick >= start && tick <= end);
    if (lane.kind === "trainer") {
      const step = inside(view.steps), publish = inside(view.publishes), wait = inside(view.waits);
      if (publish) return [[`publish v${publish[2]}`, true], [ms(publish[1] - publish[0])]];
      if (step) return [[`train step ${step[2]}`, true], [ms(step[1] - step[0])]];
      return wait ? [[`waiting for the batch of step ${wait[2]}`, true], [ms(wait[1] - wait[0])]] : [];
    }
    if (lane.kind === "weights") {
      const mark = view.versions[lane.engine].filter(([at]) => at <= tick).pop();
      return mark ? [[`${lane.engine} serves v${mark[1]}`, true]] : [];
    }
    if (lane.kind === "load") {
      const at = Math.min(lane.values[0].length - 1, Math.floor(tick / view.length * lane.values[0].length));
      return [[`${lane.name}: ${lane.note}`, true], ...lane.values.map((row, task) => [`${data.tasks[task]}: ${short(row[at])}`])];
    }
    const row = Math.floor((top - lane.top) / lane.pitch);
    const life = view.trajectories.find(([at, start, end]) => at === row && tick >= start && tick <= (end ?? view.length));
    if (!life) return [];
    const [, start, end, task, status, id, parts] = life, lines = [[id, true], [`${data.tasks[task]}, ${status}, ${ms((end ?? view.length) - start)}`]];
    for (let at = 0; at < parts.length; at += 3) {
      if (tick >= parts[at] && tick <= parts[at + 1]) lines.push([parts[at + 2] >= 0 ? `generating under v${parts[at + 2]}, ${ms(parts[at + 1] - parts[at])}` : `environment, ${ms(parts[at + 1] - parts[at])}`]);
    }
    return lines;
  }
  new ResizeObserver(() => { if (host.clientWidth !== width) requestAnimationFrame(draw); }).observe(host);
  document.addEventListener("theme", draw);
}
