// Line charts with uPlot: drawn when they scroll into view, updated in place, readable by pointer and by keyboard.
// Without uPlot, which the build fetches from npm, a chart is a table of its last values.

import { el, figure, svg } from "./dom.js";

export const COLOURS = 7;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const DASH_NAMES = ["-", "--", ":", "-."];
const KINDS = { blue: "0", orange: "1", green: "2", purple: "3", red: "wait", grey: "limit" };
const HEIGHTS = { normal: 210, compact: 150, large: 460 };
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
  const reason = "This installation has no chart library, so tables show the last values. To add it (needs npm), run ";
  return el("p", { class: "note missing-charts" }, reason, command);
}

/** Colour and dash of a line; the dash distinguishes lines without colour.
 * `style`: the number of the line, or the { color, dash } that its chart has in every display. */
function resolveStyle(style) {
  if (typeof style === "number") {
    return { kind: style % COLOURS, dash: DASHES[Math.floor(style / COLOURS) % DASHES.length] };
  }
  return { kind: KINDS[style.color], dash: DASHES[DASH_NAMES.indexOf(style.dash)] };
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Sample of a line for legends. */
export function swatch(style) {
  const { kind, dash } = resolveStyle(style);
  const line = svg("line", { x1: 0, y1: 5, x2: 26, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") });
  return svg("svg", { width: 26, height: 10, "aria-hidden": "true", class: `line line-${kind}` }, line);
}

/** A curve without axes, as high as a line of text. */
export function sparkline(values) {
  const width = 80;
  const height = 20;
  const low = Math.min(...values);
  const span = Math.max(...values) - low;
  const points = values.map((value, index) => {
    const x = (index / Math.max(1, values.length - 1)) * (width - 2) + 1;
    const share = span ? (value - low) / span : 0.5;
    return `${x.toFixed(1)},${((1 - share) * (height - 4) + 2).toFixed(1)}`;
  });
  const curve = svg("polyline", { points: points.join(" "), fill: "none", "stroke-width": 1.5 });
  return svg("svg", { width, height, "aria-hidden": "true", class: "sparkline line line-0" }, curve);
}

/** Join curves with separate x values, [{x, y}], on one axis: [x, y of each curve or null]. */
export function joinCurves(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const columns = lines.map((line) => {
    const yByX = new Map(line.x.map((x, index) => [x, line.y[index]]));
    return xs.map((x) => yByX.get(x) ?? null);
  });
  return [xs, ...columns];
}

/** Centred moving mean over `half` points before and after each point, which does not lag; half = 0 changes nothing. */
export function smoothValues(values, half) {
  if (half < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, index) => {
    const from = Math.max(0, index - half);
    const to = Math.min(values.length, index + half + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

/** A chart of spec:
 *
 *    { title, unit, doc, axis, compact, log, lines: [{ label, x, y, style, points, hidden, mean }], marks: [x] }
 *
 * While nothing is pointed at, a line shows its `mean` if it has one, otherwise its last value. Charts that are not
 * `compact` can be enlarged and downloaded. Returns { root, update(spec), close }. */
export function makeChart(first) {
  let spec = first;
  let plot = null;
  let isSeen = false;
  let isLarge = false;

  const box = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": "", onkeydown: moveCursor });
  const values = el("ul", { class: "values" });
  const unit = spec.unit && spec.unit !== "share" ? el("small", {}, ` (${spec.unit})`) : null;
  const title = el("h3", { title: spec.doc }, spec.title, unit);
  const buttons = spec.compact ? null : makeButtons();
  const root = el("section", { class: "chart" }, el("div", { class: "chart-head" }, title, buttons), box, values);

  // A page of fifty charts draws only those that are near the screen.
  const visibility = new IntersectionObserver(
    (entries) => {
      if (isSeen || !entries.some((entry) => entry.isIntersecting)) return;
      isSeen = true;
      draw();
    },
    { rootMargin: "200px" },
  );
  const resizes = new ResizeObserver(() => plot?.setSize(size()));

  function size() {
    const height = isLarge ? HEIGHTS.large : spec.compact ? HEIGHTS.compact : HEIGHTS.normal;
    return { width: Math.max(180, box.clientWidth), height };
  }

  function makeButtons() {
    const button = (text, label, onclick) =>
      el("button", { type: "button", title: label, "aria-label": label, onclick }, text);
    return el(
      "div",
      { class: "chart-buttons" },
      button("⤢", `Enlarge ${spec.title}`, enlarge),
      button("CSV", `Download ${spec.title} as CSV`, () => download(`${spec.title}.csv`, csvAddress(spec))),
      button("PNG", `Download ${spec.title} as PNG`, () => plot && download(`${spec.title}.png`, pngAddress(plot))),
    );
  }

  function enlarge() {
    isLarge = !isLarge;
    root.classList.toggle("large", isLarge);
    plot?.setSize(size());
    root.scrollIntoView({ block: "nearest" });
  }

  function draw() {
    plot?.destroy();
    plot = null;
    if (library) {
      const options = plotOptions(size(), spec, showValues, () => spec.marks ?? []);
      plot = new library(options, joinCurves(spec.lines), box);
    }
    showValues(null);
  }

  /** Show the values at an index of the joined axis; the last ones or the means for null. */
  function showValues(index) {
    const x = index === null || !plot ? null : plot.data[0][index];
    const shown = spec.lines.filter((line) => !line.hidden);
    const textOf = (line) => {
      const value = x === null && line.mean !== undefined ? line.mean : valueAt(line, x);
      return formatValue(value, spec.unit);
    };

    let head = shown.some((line) => line.mean !== undefined) ? "mean" : "last";
    if (x !== null) head = spec.axis === "time" ? `${figure(x, 1)} s` : `step ${x}`;

    const items = shown.map((line) => {
      const label = line.label ? ` ${line.label} ` : " ";
      return el("li", {}, swatch(line.style), label, el("b", {}, textOf(line)));
    });
    values.replaceChildren(el("li", { class: "at" }, head), ...items);
    const words = shown.map((line) => `${line.label} ${textOf(line)}`.trim()).join(", ");
    box.setAttribute("aria-label", `${spec.title}: ${words}, ${head}. Arrow keys read it`);
  }

  function moveCursor(event) {
    if (!plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const xs = plot.data[0];
    const last = xs.length - 1;
    if (event.key === "Escape") {
      plot.setScale("x", { min: xs[0], max: xs[last] });
      return;
    }
    const now = plot.cursor.idx ?? last;
    const wanted = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    const index = Math.min(last, Math.max(0, wanted));
    plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: 10 });
    showValues(index);
  }

  function update(next) {
    const shapeOf = ({ axis, log, lines }) => {
      return JSON.stringify([axis, log, lines.map(({ label, style, hidden }) => [label, style, hidden])]);
    };
    const isSame = shapeOf(next) === shapeOf(spec);
    spec = next;
    if (!isSeen) return;
    if (!plot || !isSame) {
      draw();
      return;
    }
    // Keep the range of a reader who has zoomed in, while a live run grows.
    const xs = plot.data[0];
    const isZoomed = plot.scales.x.min > xs[0] || plot.scales.x.max < xs.at(-1);
    plot.setData(joinCurves(spec.lines), !isZoomed);
    if (isZoomed) plot.redraw();
    showValues(plot.cursor.idx ?? null);
  }

  function close() {
    visibility.disconnect();
    resizes.disconnect();
    window.removeEventListener("themechange", draw);
    plot?.destroy();
  }

  showValues(null);
  visibility.observe(root);
  resizes.observe(box);
  window.addEventListener("themechange", draw);
  return { root, update, close };
}

/** Value of a line at the point nearest to x; the last one for null. */
function valueAt(line, x) {
  if (x === null) return line.y.at(-1);
  let low = 0;
  let high = line.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < x) low = middle + 1;
    else high = middle;
  }
  const isBeforeNearer = low > 0 && x - line.x[low - 1] < line.x[low] - x;
  return line.y[isBeforeNearer ? low - 1 : low];
}

function plotOptions(size, spec, showValues, marks) {
  const text = colourOf("--muted");
  const grid = { stroke: colourOf("--line"), width: 0.5 };
  const axis = { stroke: text, grid, ticks: grid };
  // A logarithmic axis has no place for zero.
  const isLog = Boolean(spec.log) && spec.lines.every((line) => line.y.every((y) => y > 0));

  const formatTick = (tick) => (tick === null ? "" : formatValue(tick, spec.unit));
  const makeSeries = (line) => {
    const { kind, dash } = resolveStyle(line.style);
    return {
      width: 1.6,
      spanGaps: true,
      show: !line.hidden,
      points: { show: line.points ?? line.x.length < 2 },
      stroke: colourOf(`--kind-${kind}`),
      dash,
    };
  };
  return {
    ...size,
    scales: {
      x: { time: false },
      y: isLog ? { distr: 3 } : { range: (_, low, high) => rangeOf(low, high) },
    },
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, sync: { key: `step-${spec.axis ?? "step"}` } },
    axes: [
      { ...axis, label: AXES[spec.axis ?? "step"], size: 30, labelSize: 18, labelFont: "12px system-ui" },
      { ...axis, size: 62, values: (_, ticks) => ticks.map(formatTick) },
    ],
    series: [{}, ...spec.lines.map(makeSeries)],
    hooks: {
      drawAxes: [(plot) => drawMarks(plot, marks(), text)],
      setCursor: [(plot) => showValues(plot.cursor.idx ?? null)],
    },
  };
}

/** uPlot's range, except for constant curves, which uPlot would draw from 0 to 100. */
function rangeOf(low, high) {
  if (low !== high) return library.rangeNum(low, high, 0.1, true);
  return low ? [Math.min(low / 2, low * 1.5), Math.max(low / 2, low * 1.5)] : [0, 1];
}

/** Format a value with about four digits: 24.99B, 14,436, 0.0124; shares as percent. */
function formatValue(value, unit) {
  if (unit === "share") return `${figure(100 * value, Math.abs(value) < 0.1 ? 1 : 0)}%`;
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

function csvAddress(spec) {
  const quote = (cell) => `"${String(cell ?? "").replaceAll('"', '""')}"`;
  const [xs, ...columns] = joinCurves(spec.lines);
  const head = [spec.axis ?? "step", ...spec.lines.map((line) => line.label || spec.title)];
  const rows = xs.map((x, row) => [x, ...columns.map((column) => column[row] ?? "")].join(","));
  return URL.createObjectURL(new Blob([[head.map(quote).join(","), ...rows].join("\n")], { type: "text/csv" }));
}

/** The plot on the page's background: a transparent picture is unreadable in a dark document. */
function pngAddress(plot) {
  const source = plot.ctx.canvas;
  const canvas = el("canvas", { width: source.width, height: source.height });
  const pen = canvas.getContext("2d");
  pen.fillStyle = colourOf("--surface");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, 0, 0);
  return canvas.toDataURL("image/png");
}

function download(name, address) {
  el("a", { href: address, download: name }).click();
  // The browser reads the address after this event.
  if (address.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(address), 1000);
}
