// Line charts with uPlot: drawn when they scroll into view, updated in place, readable by pointer and by keyboard.
// Without uPlot, which the build fetches from npm, a chart is a table of its last values.

import { el, figure } from "./dom.js";

export const COLOURS = 7;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const DASH_NAMES = ["-", "--", ":", "-."];
const KINDS = { blue: "0", orange: "1", green: "2", purple: "3", red: "wait", grey: "limit" };
const HEIGHT = 210;
const SYNC = "step";
const AXES = { step: "optimizer step", time: "seconds since the first step" };
let library = null;

/** Load uPlot once; false if this installation lacks it. `built`: true if the server has it. */
export async function loadCharts(built) {
  if (built && !library) {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/vendor/uplot/uPlot.min.css" }));
    library = (await import("/static/vendor/uplot/uPlot.esm.js")).default;
  }
  return library !== null;
}

/** Note for installations without charts. */
export function missingCharts() {
  const command = el("code", {}, "python -m async_grpo.lab.view.vendor");
  return el("p", { class: "note" }, "This installation has no chart library, so tables show the last values. To add it (needs npm), run ", command);
}

/** Colour and dash of a line; the dash distinguishes lines without colour. `style`: the number of the line, or the
 * { color, dash } that its chart has in every display. */
function look(style) {
  if (typeof style === "number") return { kind: style % COLOURS, dash: DASHES[Math.floor(style / COLOURS) % DASHES.length] };
  return { kind: KINDS[style.color], dash: DASHES[DASH_NAMES.indexOf(style.dash)] };
}

function lineStyle(style) {
  const { kind, dash } = look(style);
  return { stroke: getComputedStyle(document.documentElement).getPropertyValue(`--kind-${kind}`).trim(), dash };
}

/** Sample of a line for legends. */
export function swatch(style) {
  const make = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const { kind, dash } = look(style);
  const svg = make("svg", { width: 26, height: 10, "aria-hidden": "true", class: `line line-${kind}` });
  svg.append(make("line", { x1: 0, y1: 5, x2: 26, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") }));
  return svg;
}

/** Join curves with separate x values, [{x, y}], on one axis: [x, y of each curve or null]. */
export function joined(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const columns = lines.map((line) => {
    const yByX = new Map(line.x.map((x, index) => [x, line.y[index]]));
    return xs.map((x) => yByX.get(x) ?? null);
  });
  return [xs, ...columns];
}

/** Centred moving mean over `half` points before and after each point, which does not lag; half = 0 changes nothing. */
export function smoothed(values, half) {
  if (half < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, index) => {
    const from = Math.max(0, index - half);
    const to = Math.min(values.length, index + half + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

/** A chart of spec: { title, unit, doc, axis, lines: [{ label, x, y, style, points, hidden, mean }], marks: [x] }.
 * While nothing is pointed at, a line shows its `mean` if it has one, otherwise its last value.
 * Returns { root, update(spec), close }. */
export function chart(first) {
  let spec = first;
  let plot = null;
  let seen = false;
  const box = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": "", onkeydown: (event) => steer(event) });
  const values = el("ul", { class: "values" });
  const unit = spec.unit ? el("small", {}, ` (${spec.unit})`) : null;
  const root = el("section", { class: "chart" }, el("h2", { title: spec.doc }, spec.title, unit), box, values);
  const inSight = new IntersectionObserver((entries) => {
    if (seen || !entries.some((entry) => entry.isIntersecting)) return;
    seen = true;
    draw();
  }, { rootMargin: "200px" });
  const resized = new ResizeObserver(() => plot?.setSize({ width: width(), height: HEIGHT }));
  const width = () => Math.max(180, box.clientWidth);

  function draw() {
    plot?.destroy();
    plot = null;
    if (library) plot = new library(options(width(), spec, read, () => spec.marks ?? []), joined(spec.lines), box);
    read(null);
  }

  /** Show the values at an index of the joined axis; the last ones or the means for null. */
  function read(place) {
    const at = place === null || !plot ? null : plot.data[0][place];
    const shown = spec.lines.filter((line) => !line.hidden);
    const value = (line) => (at === null && line.mean !== undefined ? line.mean : valueAt(line, at));
    const item = (line) => el("li", {}, swatch(line.style), ` ${line.label} `, el("b", {}, reading(value(line))));
    const atRest = shown.some((line) => line.mean !== undefined) ? "mean" : "last";
    const head = at === null ? atRest : `${spec.axis === "time" ? `${figure(at, 1)} s` : `step ${at}`}`;
    values.replaceChildren(el("li", { class: "at" }, head), ...shown.map(item));
    box.setAttribute("aria-label", `${spec.title}: ${shown.map((line) => `${line.label} ${reading(value(line))}`).join(", ")}, ${head}. Arrow keys read it`);
  }

  function steer(event) {
    if (!plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const last = plot.data[0].length - 1;
    if (event.key === "Escape") return plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][last] });
    const now = plot.cursor.idx ?? last;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    const place = Math.min(last, Math.max(0, to));
    plot.setCursor({ left: plot.valToPos(plot.data[0][place], "x"), top: 10 });
    read(place);
  }

  function update(next) {
    const same = next.axis === spec.axis && String(next.lines.map(shape)) === String(spec.lines.map(shape));
    spec = next;
    if (!seen) return;
    if (!plot || !same) return draw();
    const [from, to] = [plot.data[0][0], plot.data[0].at(-1)];
    const zoomed = plot.scales.x.min > from || plot.scales.x.max < to;
    plot.setData(joined(spec.lines), !zoomed);
    if (zoomed) plot.redraw();
    read(plot.cursor.idx ?? null);
  }

  read(null);
  inSight.observe(root);
  resized.observe(box);
  window.addEventListener("themechange", draw);
  const close = () => {
    inSight.disconnect();
    resized.disconnect();
    window.removeEventListener("themechange", draw);
    plot?.destroy();
  };
  return { root, update, close };
}

const shape = (line) => `${line.label}|${JSON.stringify(line.style)}|${line.hidden}`;

/** Value of a line at x or at the nearest point. */
function valueAt(line, x) {
  if (x === null) return line.y.at(-1);
  let low = 0;
  let high = line.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < x) low = middle + 1;
    else high = middle;
  }
  const before = low > 0 && x - line.x[low - 1] < line.x[low] - x ? low - 1 : low;
  return line.y[before];
}

function options(width, spec, read, marks) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--muted").trim();
  const grid = { stroke: style.getPropertyValue("--line").trim(), width: 0.5 };
  const series = (line) => ({
    width: 1.6,
    spanGaps: true,
    show: !line.hidden,
    points: { show: line.points ?? line.x.length < 2 },
    ...lineStyle(line.style),
  });
  const axis = { stroke: text, grid, ticks: grid };
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high) } },
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, sync: spec.axis ? { key: `${SYNC}-${spec.axis}` } : undefined },
    axes: [
      { ...axis, label: AXES[spec.axis ?? "step"], size: 30, labelSize: 18, labelFont: "12px system-ui" },
      { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : reading(tick))) },
    ],
    series: [{}, ...spec.lines.map(series)],
    hooks: { drawAxes: [(plot) => drawMarks(plot, marks(), text)], setCursor: [(plot) => read(plot.cursor.idx ?? null)] },
  };
}

/** uPlot's range, except for constant curves, which uPlot would draw from 0 to 100. */
function rangeOf(low, high) {
  if (low !== high) return library.rangeNum(low, high, 0.1, true);
  return low ? [Math.min(low / 2, low * 1.5), Math.max(low / 2, low * 1.5)] : [0, 1];
}

/** Format a value with about four digits: 24.99B, 14,436, 0.0124. */
function reading(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  if (size > 0 && size < 1e-3) return value.toExponential(2);
  return figure(value, size >= 1000 ? 0 : size >= 10 ? 2 : 4);
}

/** Draw dotted vertical lines, such as those of evaluations. */
function drawMarks(plot, marks, colour) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.setLineDash([2, 4]);
  for (const mark of marks) {
    const x = plot.valToPos(mark, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
