// The charts are drawn already. This chooses which view of each is shown, and shows the values under the pointer.
"use strict";
const charts = [...document.querySelectorAll(".chart")];
const shown = (chart) => chart.querySelector(".plot:not([hidden])");
const isChecked = (id) => document.getElementById(id).checked;
const chosenAxis = () => document.querySelector("input[name=x]:checked").value;

// ---- views: by step, tokens or time; the loss also on a log scale and without its first tenth

function chooseViews() {
  point(null);
  const view = `${chosenAxis()}${isChecked("log") ? " log" : ""}${isChecked("late") ? " late" : ""}`;
  for (const chart of charts)
    for (const plot of chart.querySelectorAll(".plot"))
      plot.toggleAttribute("hidden", plot.dataset.view !== (chart.dataset.key === "loss" ? view : chosenAxis()));
}
for (const input of document.querySelectorAll("input")) input.onchange = chooseViews;

for (const button of document.querySelectorAll(".legend button"))
  button.onclick = () => {
    const isOff = button.classList.toggle("off");
    button.setAttribute("aria-pressed", String(!isOff));
    for (const part of document.querySelectorAll(`.plot [data-run="${button.dataset.run}"]`)) part.toggleAttribute("hidden", isOff);
  };

// ---- values under the pointer: one place on the x axis, in all charts

/** The powers of ten by which a plot's coordinates are divided, for x and y. */
const unitsOf = (plot) => plot.querySelector(".curves").dataset.units.split(" ").map(Number);
/** The points of a path, [[x, y], …]: its coordinates are the data. */
const pointsOf = (path) => {
  const [wide, tall] = unitsOf(path.closest(".plot"));
  return (path.points ??= [...path.getAttribute("d").matchAll(/[ML]([^,]+),([^ML]+)/g)].map(([, x, y]) => [x * wide, y * tall]));
};
const boxOf = (plot) => {
  const { x, y, width, height } = plot.querySelector(".curves").viewBox.baseVal, [wide, tall] = unitsOf(plot);
  return { x: x * wide, y: y * tall, width: width * wide, height: height * tall };
};
const curvesOf = (plot) => [...plot.querySelectorAll(".curve:not([hidden])")];
const nearest = (points, x) => points.reduce((best, next) => (Math.abs(next[0] - x) < Math.abs(best[0] - x) ? next : best));

const clock = (seconds) => [seconds / 3600, (seconds / 60) % 60, seconds % 60].map((n) => String(Math.floor(n)).padStart(2, "0")).join(":");
const texts = {
  step: (x) => `step ${x.toLocaleString("en")}`,
  tokens: (x) => `${x.toLocaleString("en")} tokens`,
  time: (x) => `${clock(x)} since the start`,
};
const valueText = (chart, y) => (chart.dataset.key === "loss" ? y.toFixed(4) : y.toLocaleString("en", { maximumSignificantDigits: 5 }));

/** Mark the place x in all charts, with the values in the one under the pointer; null clears it. */
function point(x, under) {
  for (const old of document.querySelectorAll(".hover, .tip")) old.remove();
  if (x === null) return;
  for (const chart of charts.filter(shown)) {
    const plot = shown(chart), box = boxOf(plot), hover = draw(plot, "g", { class: "hover" });
    const percent = (at) => `${(100 * (at - box.x)) / box.width}%`;
    draw(hover, "line", { x1: percent(x), x2: percent(x), y1: 0, y2: "100%" });
    const lines = [];
    for (const curve of curvesOf(plot)) {
      const points = pointsOf(curve);
      if (!points.length || x < points[0][0] || x > points.at(-1)[0]) continue; // it has not begun, or has ended
      const [at, y] = nearest(points, x);
      draw(hover, "circle", { cx: percent(at), cy: `${(100 * (-y - box.y)) / box.height}%`, r: 4, style: curve.getAttribute("style") });
      lines.push([curve, valueText(chart, plot.dataset.view.includes("log") ? 10 ** y : y)]);
    }
    if (chart === under) tip(chart, (x - box.x) / box.width, texts[chosenAxis()](x), lines);
  }
}

function draw(parent, tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

function tip(chart, share, title, lines) {
  const box = document.createElement("div");
  box.className = "tip";
  box.append(title);
  for (const [curve, value] of lines) {
    const line = document.createElement("div"), dot = document.createElement("i"), bold = document.createElement("b");
    dot.style.background = curve.style.getPropertyValue("--colour");
    bold.textContent = value;
    line.append(dot, `${curve.dataset.name} `, bold);
    box.append(line);
  }
  chart.append(box);
  const plot = shown(chart).getBoundingClientRect(), at = plot.left - chart.getBoundingClientRect().left + share * plot.width;
  box.style.left = `${at + 14 + box.offsetWidth > chart.clientWidth ? Math.max(0, at - 14 - box.offsetWidth) : at + 14}px`;
}

for (const chart of charts) {
  chart.addEventListener("pointermove", (event) => {
    if (!shown(chart)) return; // no run has both this metric and this axis
    const plot = shown(chart), place = plot.getBoundingClientRect(), box = boxOf(plot);
    const share = (event.clientX - place.left) / place.width, x = box.x + share * box.width;
    const points = curvesOf(plot).flatMap(pointsOf);
    point(share < 0 || share > 1.001 || !points.length ? null : nearest(points, x)[0], chart);
  });
  chart.addEventListener("pointerleave", () => point(null));
}

// ---- light or dark

const theme = document.getElementById("theme"), root = document.documentElement;
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); };
nameTheme();
