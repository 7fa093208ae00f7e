"use strict";
// Line charts in SVG. One chart hovered marks the same step in all of them.

const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const taskColor = (index) => `var(--t${index % 6})`;

function svg(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function element(tag, className, parent, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1).replace(".0e", "e").replace("-", "\u2212");
  if (size >= 10000) return `${+(value / 1000).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) ticks.push(at * step);
  return ticks;
}

const tip = element("div", "tip", document.body);
tip.hidden = true;
function showTip(event, lines) {
  tip.replaceChildren();
  lines.forEach(([text, strong], index) => {
    if (index) tip.append("\n");
    tip.append(strong ? Object.assign(document.createElement("b"), { textContent: text }) : text);
  });
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + gap, innerHeight - box.height - 4))}px`;
}

const EXTRA = [["var(--ink)", "5 3"], ["var(--soft)", "1.5 2.5"], ["var(--faint)", ""]];
function lineStyle(chart, line) {
  if (line.task >= 0) return [taskColor(line.task), ""];
  if (chart.lines.every((other) => other.task < 0)) return [["var(--t3)", "var(--v2)", "var(--ink)"][(-1 - line.task) % 3], ""];
  return EXTRA[(-1 - line.task) % 3];
}

function range(chart) {
  const values = chart.lines.flatMap((line) => line.values).filter((value) => value !== null);
  if (chart.bound !== null) values.push(chart.bound);
  let low = Math.min(...values), high = Math.max(...values);
  if (chart.low !== null) low = Math.min(chart.low, low);
  if (chart.high !== null) high = Math.max(chart.high, high);
  if (high - low < 1e-12) { high += Math.abs(high) * 0.1 || 1; if (chart.low === null) low -= Math.abs(low) * 0.1; }
  const room = (high - low) * 0.06;
  return [chart.low !== null && low >= chart.low ? low : low - room, chart.high !== null && high <= chart.high ? high : high + room];
}

// Many noisy steps: each one faint, and a running mean. Not where there is a bound: a mean would hide what came near it.
const MANY = 80;
function spanOf(chart) {
  return chart.x.length > MANY && chart.bound === null ? 2 * Math.round(chart.x.length / 80) + 1 : 1;
}

function runningMean(values, span) {
  const half = (span - 1) / 2;
  return values.map((value, index) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

const drawn = [];
function drawChart(card, chart) {
  card.querySelector("svg.plot")?.remove();
  const width = card.clientWidth - 28, height = 178, left = 38, right = 8, top = 10, bottom = 26;
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title}, ${chart.unit}, by step` });
  card.appendChild(plot);
  const first = 0, last = Math.max(chart.x[chart.x.length - 1], first + 1);
  const [low, high] = range(chart);
  const x = (step) => left + (step - first) / (last - first) * (width - left - right);
  const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
  for (const tick of niceTicks(low, high, 4)) {
    svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), stroke: "var(--grid)" }, plot);
    svg("text", { x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, plot, short(tick));
  }
  for (const tick of niceTicks(first, last, Math.min(6, width / 60)).filter(Number.isInteger)) {
    svg("text", { x: x(tick), y: height - bottom + 15, "text-anchor": "middle" }, plot, tick);
  }
  svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--rule)" }, plot);
  svg("text", { x: width - right, y: height - 1, "text-anchor": "end" }, plot, "step");
  if (chart.bound !== null) {
    svg("line", { x1: left, x2: width - right, y1: y(chart.bound), y2: y(chart.bound), stroke: "var(--bad)", "stroke-dasharray": "4 3", "stroke-width": 1.2 }, plot);
    svg("text", { x: left + 4, y: y(chart.bound) - 4, style: "fill: var(--bad)" }, plot, `bound ${chart.bound}`);
  }
  for (const line of [...chart.lines].sort((one, other) => one.task - other.task)) {
    const [stroke, dash] = lineStyle(chart, line), span = spanOf(chart);
    const draw = (values, width, opacity) => {
      let path = "", pen = false;
      values.forEach((value, index) => {
        if (value === null) { pen = false; return; }
        path += `${pen ? "L" : "M"}${x(chart.x[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = true;
      });
      svg("path", { d: path, fill: "none", stroke, opacity, "stroke-width": width, "stroke-linejoin": "round", "stroke-linecap": "round", "stroke-dasharray": dash }, plot);
    };
    if (span > 1) draw(line.values, 1, 0.28);
    draw(span > 1 ? runningMean(line.values, span) : line.values, 1.8, 1);
  }
  for (const point of chart.points) {
    svg("circle", { cx: x(point.x), cy: y(point.y), r: 4, fill: "var(--card)", stroke: taskColor(point.task), "stroke-width": 2 }, plot);
  }
  const cursor = svg("line", { y1: top, y2: height - bottom, stroke: "var(--faint)", visibility: "hidden" }, plot);
  const hover = (step) => {
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); }
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const step = first + (event.clientX - box.left - left) / (width - left - right) * (last - first);
    const index = chart.x.reduce((best, value, at) => Math.abs(value - step) < Math.abs(chart.x[best] - step) ? at : best, 0);
    drawn.forEach((other) => other.hover(chart.x[index]));
    const lines = chart.lines.map((line) => [`${line.name}: ${short(line.values[index])}`]);
    const points = chart.points.filter((point) => Math.abs(point.x - chart.x[index]) <= (last - first) / 40);
    const evals = points.map((point) => [`${data.tasks[point.task]} evaluation (${point.split}): ${short(point.y)}`]);
    showTip(event, [[`step ${chart.x[index]}`, true], ...lines, ...evals]);
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; drawn.forEach((other) => other.hover(null)); });
  return { hover };
}

function setUpCharts() {
  const host = document.getElementById("charts");
  if (!host) return;
  const legend = element("div", "legend", host);
  data.tasks.forEach((task, index) => {
    const item = element("span", "", legend);
    element("i", `dot t${index % 6}`, item);
    item.append(task);
  });
  if (data.charts.some((chart) => chart.points.length)) {
    const item = element("span", "", legend);
    const ring = svg("svg", { width: 12, height: 12, style: "vertical-align:-1px;margin-right:7px" }, item);
    svg("circle", { cx: 6, cy: 6, r: 4, fill: "none", stroke: "var(--soft)", "stroke-width": 2 }, ring);
    item.append("evaluation, sampled");
  }
  const span = Math.max(...data.charts.map(spanOf));
  if (span > 1) element("span", "", legend, `faint: each step; bold: running mean of ${span} steps`);
  const grid = element("div", "charts", host);
  const cards = data.charts.map((chart) => {
    const card = element("div", "chart", grid);
    const caption = element("div", "caption", card);
    element("h3", "", caption, chart.title);
    element("small", "", caption, chart.unit + (chart.stride > 1 ? `; each point: mean of ${chart.stride} steps` : ""));
    const extra = element("div", "extra", card);
    for (const line of chart.lines.filter((candidate) => candidate.task < 0 && chart.lines.length > 1)) {
      const [stroke, dash] = lineStyle(chart, line), item = element("span", "", extra);
      svg("line", { x1: 0, x2: 20, y1: 3, y2: 3, stroke, "stroke-width": 2, "stroke-dasharray": dash }, svg("svg", { width: 20, height: 6 }, item));
      item.append(line.name);
    }
    return card;
  });
  const redraw = () => { drawn.splice(0, drawn.length, ...cards.map((card, index) => drawChart(card, data.charts[index]))); };
  let width = 0;
  new ResizeObserver(() => { if (grid.clientWidth !== width) { width = grid.clientWidth; requestAnimationFrame(redraw); } }).observe(grid);
}

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = color("--dark") ? "light" : "dark";
  document.dispatchEvent(new Event("theme"));
});
