// Draws the curves of the runs in #data as SVG: shared x axis (step, tokens or time), hover values, log scale.
"use strict";
const { runs, band } = JSON.parse(document.getElementById("data").textContent);
const state = { x: "step", log: false, late: false, hidden: new Set(), at: null };
for (const run of runs)
  for (const series of [run.train, run.val, run.restarts]) series.tokens = series.step.map((step) => step * run.batch_tokens);
const one = runs.length === 1;

// ---- numbers

const short = (value) => {
  const size = Math.abs(value);
  for (const [unit, suffix] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]])
    if (size >= unit) return +(value / unit).toPrecision(4) + suffix;
  return size && size < 1e-2 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
};
const clock = (seconds) => {
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  return seconds < 172800 ? `${+(seconds / 3600).toPrecision(3)} h` : `${+(seconds / 86400).toPrecision(3)} days`;
};
const percent = (share) => `${+(100 * share).toPrecision(3)} %`;
const AXES = {
  step: { label: "step", show: (v) => Math.round(v).toLocaleString("en") },
  tokens: { label: "tokens", show: short },
  time: { label: "time since the start", show: clock },
};

function ticks(low, high, about, units = [1, 2, 5, 10]) {
  const rough = (high - low) / about || 1, size = 10 ** Math.floor(Math.log10(rough));
  const gap = units.map((n) => n * size).find((n) => n >= rough * 0.999), found = [];
  for (let n = Math.ceil(low / gap - 1e-9); n * gap <= high + gap * 1e-9; n++) found.push(n * gap || 0);
  return found;
}

function timeTicks(low, high, about) {
  const gaps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const gap = gaps.find((g) => (high - low) / g <= about) ?? 86400 * Math.ceil((high - low) / 86400 / about), found = [];
  for (let t = Math.ceil(low / gap) * gap; t <= high * 1.0001; t += gap) found.push(t);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
    for (const n of [1, 2, 3, 5]) { const v = n * 10 ** e; if (v >= low * 0.999 && v <= high * 1.001) found.push(v); }
  return found.length > 2 ? found : ticks(low, high, 5);
}

// ---- drawing

const colour = (n) => `var(--c${n % 6})`;
const dash = (n) => ["", "6 3", "2 3"][Math.floor(n / 6) % 3];
const svg = (tag, attributes = {}, parent) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
};

/** The curves of a chart: [{name, colour, x, y, kind}], those of hidden runs and without a value left out. */
function curvesOf(chart) {
  const found = [];
  runs.forEach((run, n) => {
    if (state.hidden.has(n)) return;
    const add = (from, key, kind, label, c) => {
      if (from[key].some((v) => v !== null))
        found.push({ name: one ? label : `${run.name} ${label}`, colour: colour(c), dash: dash(n), x: from[state.x], y: from[key], kind });
    };
    if (chart.key === "loss") {
      add(run.train, "loss", one ? "line" : "faint", "training", n);
      add(run.val, "loss", "points", "validation", one ? 1 : n);
    } else add(run.train, chart.key, "line", one ? chart.title.toLowerCase() : "", n);
  });
  return found;
}

/** The band of reference runs is known by step; over tokens it is the same, over time it means nothing. */
function bandOf(chart) {
  if (chart.key !== "loss" || !band || state.x === "time") return null;
  const factor = state.x === "tokens" ? band.batch_tokens : 1;
  return { ...band, x: band.steps.map((step) => step * factor) };
}

/** What the axes span; y only of what is seen between left and right. */
function extent(chart, curves, shade) {
  const right = Math.max(...curves.flatMap((c) => c.x.filter((v) => v !== null)), 1e-9), left = state.late ? right / 10 : 0;
  const ys = curves.flatMap((c) => c.y.filter((v, n) => v !== null && c.x[n] !== null && c.x[n] >= left));
  if (shade) shade.x.forEach((v, n) => { if (v >= left && v <= right) ys.push(shade.low[n], shade.high[n]); });
  let low = Math.min(...ys), high = Math.max(...ys);
  if (chart.zero) low = Math.min(0, low);
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  return { left, right, low, high };
}

function draw(chart) {
  const { element } = chart, width = element.clientWidth - 28, height = chart.wide ? 330 : 180;
  const edge = { left: 46, right: 10, top: 12, bottom: 34 };
  const curves = curvesOf(chart), shade = bandOf(chart);
  element.querySelector("svg")?.remove();
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${chart.title} by ${AXES[state.x].label}` });
  element.append(root);
  if (!curves.length) { chart.scale = null; return; }
  const isLog = state.log && chart.key === "loss", span = extent(chart, curves, shade);
  const room = (span.high - span.low) * 0.04, t = isLog ? Math.log : (v) => v;
  const low = isLog ? span.low * 0.97 : chart.zero && span.low === 0 ? 0 : span.low - room, high = isLog ? span.high * 1.03 : span.high + room;
  const x = (v) => edge.left + ((v - span.left) / (span.right - span.left)) * (width - edge.left - edge.right);
  const y = (v) => height - edge.bottom - ((t(v) - t(low)) / (t(high) - t(low))) * (height - edge.top - edge.bottom);
  chart.scale = { x, y, curves, edge, width, height, left: span.left, right: span.right };

  for (const tick of isLog ? logTicks(low, high) : ticks(low, high, chart.wide ? 6 : 4)) {
    svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y(tick), y2: y(tick) }, root);
    svg("text", { x: edge.left - 8, y: y(tick) + 4, "text-anchor": "end" }, root).textContent = (chart.show ?? short)(tick);
  }
  const count = Math.max(2, Math.floor(width / 110));
  for (const tick of state.x === "time" ? timeTicks(span.left, span.right, count) : ticks(span.left, span.right, count)) {
    svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: height - edge.bottom, y2: height - edge.bottom + 4 }, root);
    svg("text", { x: x(tick), y: height - edge.bottom + 17, "text-anchor": "middle" }, root).textContent = AXES[state.x].show(tick);
  }
  svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom }, root);
  if (chart.wide) svg("text", { x: (edge.left + width - edge.right) / 2, y: height - 2, "text-anchor": "middle" }, root).textContent = AXES[state.x].label;

  if (shade) drawBand(root, shade, x, y, span);
  drawRestarts(root, x, edge, height, span);
  for (const curve of curves) drawCurve(root, curve, x, y, span);
  chart.hover = svg("g", {}, root);
}

function drawBand(root, shade, x, y, { left, right }) {
  const points = shade.x.map((v, n) => [v, shade.low[n], shade.high[n]]).filter(([v]) => v >= left && v <= right * 1.001);
  const up = points.map(([v, , high]) => `${x(v)},${y(high)}`), down = points.reverse().map(([v, low]) => `${x(v)},${y(low)}`);
  svg("polygon", { class: "band", points: [...up, ...down].join(" ") }, root);
}

function drawRestarts(root, x, edge, height, { left, right }) {
  runs.forEach((run, n) => {
    if (state.hidden.has(n)) return;
    run.restarts[state.x].forEach((at, number) => {
      if (at === null || at < left || at > right) return;
      const bottom = height - edge.bottom;
      svg("line", { class: "restart", x1: x(at), x2: x(at), y1: edge.top, y2: bottom }, root);
      const mark = svg("path", { class: "restart-mark", d: `M${x(at) - 4},${edge.top - 7}h8l-4,7z` }, root);
      svg("title", {}, mark).textContent = `${run.name} was restarted after step ${run.restarts.step[number]}`;
    });
  });
}

function drawCurve(root, curve, x, y, { left }) {
  let path = "", broken = true;
  curve.y.forEach((value, n) => {
    const gap = value === null || curve.x[n] === null || curve.x[n] < left || !Number.isFinite(y(value));
    if (!gap) path += `${broken ? "M" : "L"}${x(curve.x[n]).toFixed(1)},${y(value).toFixed(1)}`;
    broken = gap;
  });
  svg("path", { class: `curve ${curve.kind}`, d: path, stroke: curve.colour, "stroke-dasharray": curve.dash }, root);
  if (curve.kind !== "points") return;
  const radius = curve.y.length > 60 ? 2 : 3.2;
  curve.y.forEach((value, n) => {
    if (value !== null && curve.x[n] !== null && curve.x[n] >= left) svg("circle", { cx: x(curve.x[n]), cy: y(value), r: radius, fill: curve.colour }, root);
  });
}

// ---- hovering: one place on the x axis, in all charts

const nearest = (column, at) => {
  let best = -1;
  column.forEach((v, n) => { if (v !== null && (best < 0 || Math.abs(v - at) < Math.abs(column[best] - at))) best = n; });
  return best;
};

function point(chart, isUnder) {
  const { element, scale, hover } = chart;
  element.querySelector(".tip")?.remove();
  if (!hover) return;
  hover.replaceChildren();
  if (state.at === null || !scale || state.at < scale.left || state.at > scale.right) return;
  svg("line", { class: "cross", x1: scale.x(state.at), x2: scale.x(state.at), y1: scale.edge.top, y2: scale.height - scale.edge.bottom }, hover);
  const lines = [];
  for (const curve of scale.curves) {
    const n = nearest(curve.x.map((v, i) => (curve.y[i] === null ? null : v)), state.at);
    if (n < 0 || state.at > Math.max(...curve.x) || state.at < Math.min(...curve.x)) continue; // it has not begun, or has ended
    svg("circle", { cx: scale.x(curve.x[n]), cy: scale.y(curve.y[n]), r: 4, fill: curve.colour, stroke: "var(--card)", "stroke-width": 1.5 }, hover);
    lines.push([curve, curve.y[n], curve.x[n]]);
  }
  if (isUnder) tip(chart, lines);
}

function tip(chart, lines) {
  const { element, scale } = chart, box = document.createElement("div");
  box.className = "tip";
  box.append(`${AXES[state.x].label} ${AXES[state.x].show(state.at)}`);
  for (const [curve, value] of lines) {
    const line = document.createElement("div"), dot = document.createElement("i"), bold = document.createElement("b");
    dot.style.background = curve.colour;
    bold.textContent = (chart.show ?? ((v) => (chart.key === "loss" ? v.toFixed(4) : short(v))))(value);
    line.append(dot, `${curve.name} `, bold);
    box.append(line);
  }
  element.append(box);
  const at = scale.x(state.at) + 14;
  box.style.left = `${at + 14 + box.offsetWidth > element.clientWidth ? at - box.offsetWidth - 6 : at + 14}px`;
  box.style.top = "2.6rem";
}

function listen(chart) {
  chart.element.addEventListener("pointermove", (event) => {
    if (!chart.scale) return;
    const { edge, width, left, right, curves } = chart.scale, box = chart.element.querySelector("svg").getBoundingClientRect();
    const share = ((event.clientX - box.left) * (width / box.width) - edge.left) / (width - edge.left - edge.right);
    const at = left + share * (right - left);
    const known = curves.flatMap((curve) => { const n = nearest(curve.x, at); return n < 0 ? [] : [curve.x[n]]; });
    const n = nearest(known, at);
    state.at = share < 0 || share > 1 || n < 0 ? null : known[n];
    charts.forEach((other) => point(other, other === chart));
  });
  chart.element.addEventListener("pointerleave", () => { state.at = null; charts.forEach((other) => point(other, false)); });
}

// ---- the page

const CHARTS = [
  { key: "loss", title: "Loss", wide: true },
  { key: "lr", title: "Learning rate", zero: true },
  { key: "grad_norm", title: "Gradient norm", zero: true },
  { key: "tokens_per_s", title: "Tokens per second", zero: true },
  { key: "mfu", title: "MFU", zero: true, show: percent },
  { key: "data_wait_s", title: "Waiting for data, per log line", zero: true, show: clock },
];

function legend() {
  const box = document.querySelector(".legend");
  const swatch = (c, d, dot) => {
    const root = svg("svg", { width: 22, height: 10 });
    svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: c, "stroke-width": 2, "stroke-dasharray": d }, root);
    if (dot) svg("circle", { cx: 11, cy: 5, r: 3.2, fill: c }, root);
    return root;
  };
  const entry = (tag, ...content) => { const made = document.createElement(tag); made.append(...content); box.append(made); return made; };
  if (one) { entry("span", swatch(colour(0), ""), "training"); entry("span", swatch(colour(1), "", true), "validation"); }
  else runs.forEach((run, n) => {
    const button = entry("button", swatch(colour(n), dash(n), true), run.name);
    button.title = "show or hide";
    button.setAttribute("aria-pressed", "true");
    button.onclick = () => {
      state.hidden.has(n) ? state.hidden.delete(n) : state.hidden.add(n);
      button.classList.toggle("off", state.hidden.has(n));
      button.setAttribute("aria-pressed", String(!state.hidden.has(n)));
      charts.forEach(draw);
    };
  });
  if (!one) entry("span", "faint: training, with points: validation").className = "soft";
  if (band) {
    const root = svg("svg", { width: 22, height: 10 });
    svg("rect", { class: "band", width: 22, height: 10, rx: 2 }, root);
    entry("span", root, `expected of ${band.recipe}`);
  }
  if (runs.some((run) => run.restarts.step.length)) entry("span", "▾ restarted").className = "soft";
}

const holder = document.querySelector(".charts");
const charts = CHARTS.filter((chart) => runs.some((run) => run.train[chart.key].some((v) => v !== null) || (chart.key === "loss" && run.val.loss.length)));
for (const chart of charts) {
  chart.element = document.createElement("div");
  chart.element.className = `chart card${chart.wide ? " wide" : ""}`;
  chart.element.dataset.key = chart.key;
  const title = document.createElement("h3");
  title.append(chart.title);
  if (chart.key === "loss") {
    const options = document.createElement("span");
    for (const [key, text] of [["late", "without the first tenth"], ["log", "log scale"]]) {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.id = `only-${key}`;
      box.onchange = () => { state[key] = box.checked; charts.forEach(draw); };
      label.append(box, text);
      options.append(label);
    }
    title.append(options);
  }
  chart.element.append(title);
  holder.append(chart.element);
  listen(chart);
}
legend();
charts.forEach(draw);
new ResizeObserver(() => charts.forEach(draw)).observe(holder);

for (const input of document.querySelectorAll("input[name=x]")) {
  input.disabled = !runs.some((run) => run.train[input.value].some((v) => v !== null));
  input.onchange = () => { state.x = input.value; state.at = null; charts.forEach(draw); };
}

const theme = document.getElementById("theme");
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.onclick = () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); };
nameTheme();
