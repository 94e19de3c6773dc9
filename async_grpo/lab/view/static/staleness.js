// Ages of trained tokens and their bound, idle shares of both sides, and outcomes of groups.

import { chart, COLOURS, loadCharts, missingCharts } from "./charts.js";
import { el, fetchJson, figure, readAgain, stillReading } from "./dom.js";

const STRIP_ROW = 22;
const STRIP_LABEL = 48;

/** The view of one run. */
export function stalenessView(root, run) {
  const verdict = el("p", { class: "verdict-line", role: "status" });
  const grid = el("div", { class: "charts" });
  const strip = ageStrip();
  const totals = el("div");
  root.replaceChildren(verdict, grid, strip.root, totals);
  const charts = new Map();
  let request = 0;
  let reading = null;

  async function refresh() {
    const mine = ++request;
    const path = encodeURIComponent(run);
    try {
      const metrics = await fetchJson("/api/metrics");
      if (!(await loadCharts(metrics.charts)) && !root.querySelector(".note")) root.prepend(missingCharts());
      const query = new URLSearchParams([["run", run], ...metrics.staleness.flatMap(keysOf).map((key) => ["key", key])]);
      const [[curves], facts] = await Promise.all([fetchJson(`/api/curves?${query}`), fetchJson(`/api/runs/${path}/staleness`)]);
      if (mine !== request) return;
      show(metrics, curves, facts);
      clearTimeout(reading);
      reading = readAgain(curves.read, refresh);
    } catch (error) {
      if (mine === request) verdict.textContent = error.message;
    }
  }

  function show(metrics, curves, facts) {
    verdict.textContent = stillReading(curves.read) + sentence(curves);
    const limits = { age_bound: curves.age_bound, capacity_groups: facts.capacity };
    for (const spec of metrics.staleness.map((each) => ({ ...each, axis: "step", lines: linesOf(each, curves, limits) }))) {
      if (!spec.lines.length) continue;
      if (charts.has(spec.title)) charts.get(spec.title).update(spec);
      else {
        charts.set(spec.title, chart(spec));
        grid.append(charts.get(spec.title).root);
      }
    }
    strip.update(metrics.tokens_by_age.title, facts.ages, curves.age_bound);
    totals.replaceChildren(...totalsTable(facts.totals));
  }

  refresh();
  const close = () => {
    request += 1;
    clearTimeout(reading);
    strip.close();
    for (const each of charts.values()) each.close();
  };
  return { refresh, close };
}

function sentence({ curves, age_bound: bound, status }) {
  if (!curves.age_max) return "No step has been trained yet.";
  const oldest = Math.max(...curves.age_max[1]);
  const soFar = status === "live" ? " so far" : "";
  const age = `The oldest trained token${soFar} was ${oldest === 1 ? "1 step" : `${figure(oldest, 0)} steps`} old`;
  if (bound === null) return `${age}.`;
  const kept = status === "live" ? "the bound is kept" : "the bound was kept";
  return `${age}, and the bound is ${figure(bound, 0)}: ${oldest <= bound ? kept : "THE BOUND WAS BROKEN"}.`;
}

/** Keys to request: those of the curves, or all names of a family. Limits are not in the answer: steps have none. */
function keysOf({ family, series }) {
  return series.length ? series.map((each) => each.key) : [`${family}.`];
}

/** The lines of a chart: its curves and limits, or every name of its family with a value. */
function linesOf({ family, series }, { curves, means }, limits) {
  if (!series.length) return familyLines(family, curves);
  const lines = series.filter((each) => isShown(each, curves)).map(({ key, label, style }) => ({ label, x: curves[key][0], y: curves[key][1], style, mean: means[key] }));
  if (!lines.length) return [];
  const { x } = lines[0];
  const across = series.filter(({ key }) => limits[key] != null).map(({ key, label, style }) => ({ label, x, y: x.map(() => limits[key]), style }));
  return [...lines, ...across];
}

function isShown({ key, only_if_varying: onlyIfVarying }, curves) {
  return key in curves && (!onlyIfVarying || new Set(curves[key][1]).size > 1);
}

function familyLines(family, curves) {
  const keys = Object.keys(curves).filter((key) => key.startsWith(`${family}.`) && curves[key][1].at(-1) > 0);
  return keys.map((key, place) => ({ label: key.slice(family.length + 1), x: curves[key][0], y: curves[key][1], style: (COLOURS + 1) * place }));
}

function totalsTable(totals) {
  if (!totals) return [];
  const rows = Object.entries(totals).map(([reason, count]) => el("tr", {}, el("th", { scope: "row" }, reason), el("td", { class: "number" }, figure(count, 0))));
  return [el("h2", {}, "What became of the groups"), el("table", { class: "narrow" }, el("tbody", {}, rows))];
}

/** Ages of the tokens of each step: a row per age, darker for a larger share. */
function ageStrip() {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Ages of tokens by step" });
  const read = el("p", { class: "status" });
  const head = el("h2");
  const root = el("section", { class: "age-strip", hidden: true }, head, canvas, read);
  const state = { ages: null, bound: null, place: null };
  const resized = new ResizeObserver(() => draw());

  function draw() {
    const { ages, bound } = state;
    if (!ages?.ages.length || !canvas.clientWidth) return;
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, STRIP_ROW * ages.ages.length];
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.scale(scale, scale);
    ages.share.forEach((shares, row) => {
      const top = height - STRIP_ROW * (row + 1);
      context.fillStyle = style.getPropertyValue(bound !== null && ages.ages[row] > bound ? "--kind-wait" : "--kind-0");
      shares.forEach((share, column) => {
        context.globalAlpha = Math.sqrt(share);
        const left = STRIP_LABEL + Math.floor((column * (width - STRIP_LABEL)) / shares.length);
        context.fillRect(left, top, STRIP_LABEL + Math.ceil(((column + 1) * (width - STRIP_LABEL)) / shares.length) - left, STRIP_ROW - 1);
      });
      context.globalAlpha = 1;
      context.fillStyle = style.getPropertyValue("--text");
      context.fillText(`age ${ages.ages[row]}`, 4, top + STRIP_ROW - 8);
    });
  }

  function tell(place) {
    const { ages } = state;
    if (!ages?.x.length) return;
    state.place = Math.min(ages.x.length - 1, Math.max(0, place));
    const shares = ages.ages.map((age, row) => [age, ages.share[row][state.place]]).filter(([, share]) => share > 0);
    read.textContent = `From step ${ages.x[state.place]}: ${shares.map(([age, share]) => `age ${age}: ${figure(100 * share, 1)} %`).join(", ")}`;
  }

  const placeAt = (pixel) => Math.floor(((pixel - STRIP_LABEL) / (canvas.clientWidth - STRIP_LABEL)) * (state.ages?.x.length ?? 0));
  canvas.addEventListener("pointermove", (event) => tell(placeAt(event.offsetX)));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    tell((state.place ?? -1) + by);
  });
  resized.observe(canvas);
  window.addEventListener("themechange", draw);
  const update = (title, ages, bound) => {
    head.textContent = title;
    Object.assign(state, { ages, bound });
    root.hidden = !ages.ages.length;
    draw();
    tell(state.place ?? ages.x.length - 1);
  };
  const close = () => {
    resized.disconnect();
    window.removeEventListener("themechange", draw);
  };
  return { root, update, close };
}
