// Ages of trained tokens and their bound, idle shares of both sides, and outcomes of groups.

import { loadCharts, makeChart, missingCharts } from "./charts.js";
import { el, fetchJson, figure, percent, readAgain, runPath, stillReading } from "./dom.js";
import { keysOf, linesOf } from "./series.js";

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
  let timer = null;

  async function refresh() {
    const mine = ++request;
    try {
      const metrics = await fetchJson("/api/metrics");
      if (!(await loadCharts(metrics.charts)) && !root.querySelector(".missing-charts")) root.prepend(missingCharts());
      const keys = metrics.staleness.flatMap(keysOf);
      const query = new URLSearchParams([["run", run], ...keys.map((key) => ["key", key])]);
      const [[curves], facts] = await Promise.all([
        fetchJson(`/api/curves?${query}`),
        fetchJson(`${runPath(run)}/staleness`),
      ]);
      if (mine !== request) return;

      show(metrics, curves, facts);
      clearTimeout(timer);
      timer = readAgain(curves.read, refresh);
    } catch (error) {
      if (mine === request) verdict.textContent = error.message;
    }
  }

  function show(metrics, curves, facts) {
    verdict.textContent = stillReading(curves.read) + describeAges(curves);
    const limits = { age_bound: curves.age_bound, capacity_groups: facts.capacity };
    for (const chart of metrics.staleness) {
      const spec = { ...chart, axis: "step", lines: linesOf(chart, curves, limits) };
      if (!spec.lines.length) continue;
      if (charts.has(chart.title)) {
        charts.get(chart.title).update(spec);
      } else {
        charts.set(chart.title, makeChart(spec));
        grid.append(charts.get(chart.title).root);
      }
    }
    strip.update(metrics.tokens_by_age.title, facts.ages, curves.age_bound);
    totals.replaceChildren(...totalsTable(facts.totals));
  }

  refresh();
  const close = () => {
    request += 1;
    clearTimeout(timer);
    strip.close();
    for (const chart of charts.values()) chart.close();
  };
  return { refresh, close };
}

/** One sentence about the bound: in the present tense while the run is live. */
function describeAges({ curves, age_bound: bound, status }) {
  if (!curves.age_max) return "No step has been trained yet.";
  const oldest = Math.max(...curves.age_max[1]);
  const steps = oldest === 1 ? "1 step" : `${figure(oldest, 0)} steps`;
  const isLive = status === "live";
  const age = `The oldest trained token${isLive ? " so far" : ""} was ${steps} old`;
  if (bound === null) return `${age}.`;

  const kept = isLive ? "the bound is kept" : "the bound was kept";
  return `${age}, and the bound is ${figure(bound, 0)}: ${oldest <= bound ? kept : "THE BOUND WAS BROKEN"}.`;
}

function totalsTable(totals) {
  if (!totals) return [];
  const rows = Object.entries(totals).map(([reason, count]) =>
    el("tr", {}, el("th", { scope: "row" }, reason), el("td", { class: "number" }, figure(count, 0))),
  );
  return [el("h2", {}, "What became of the groups"), el("table", { class: "narrow" }, el("tbody", {}, rows))];
}

/** Ages of the tokens of each step: a row per age, darker for a larger share. */
function ageStrip() {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Ages of tokens by step" });
  const readout = el("p", { class: "status" });
  const title = el("h2");
  const root = el("section", { class: "age-strip", hidden: true }, title, canvas, readout);
  let ages = null; // { x: [step], ages: [age], share: [[share of the age in the step]] }
  let bound = null;
  let column = null;

  function draw() {
    if (!ages?.ages.length || !canvas.clientWidth) return;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = STRIP_ROW * ages.ages.length;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    ages.ages.forEach((age, row) => drawAge(pen, age, ages.share[row], height - STRIP_ROW * (row + 1), width));
  }

  function drawAge(pen, age, shares, top, width) {
    const style = getComputedStyle(document.documentElement);
    const left = (index) => STRIP_LABEL + (index * (width - STRIP_LABEL)) / shares.length;
    pen.fillStyle = style.getPropertyValue(bound !== null && age > bound ? "--kind-wait" : "--kind-0");
    shares.forEach((share, index) => {
      // The root makes a share of 1% visible next to one of 90%.
      pen.globalAlpha = Math.sqrt(share);
      const from = Math.floor(left(index));
      pen.fillRect(from, top, Math.ceil(left(index + 1)) - from, STRIP_ROW - 1);
    });
    pen.globalAlpha = 1;
    pen.fillStyle = style.getPropertyValue("--text");
    pen.fillText(`age ${age}`, 4, top + STRIP_ROW - 8);
  }

  function showColumn(index) {
    if (!ages?.x.length) return;
    column = Math.min(ages.x.length - 1, Math.max(0, index));
    const present = ages.ages.map((age, row) => [age, ages.share[row][column]]).filter(([, share]) => share > 0);
    const shares = present.map(([age, share]) => `age ${age}: ${percent(share, 1)}`).join(", ");
    readout.textContent = `From step ${ages.x[column]}: ${shares}`;
  }

  canvas.addEventListener("pointermove", (event) => {
    const share = (event.offsetX - STRIP_LABEL) / (canvas.clientWidth - STRIP_LABEL);
    showColumn(Math.floor(share * (ages?.x.length ?? 0)));
  });
  canvas.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    showColumn((column ?? -1) + direction);
  });
  const resizes = new ResizeObserver(draw);
  resizes.observe(canvas);
  window.addEventListener("themechange", draw);

  function update(heading, newAges, newBound) {
    title.textContent = heading;
    ages = newAges;
    bound = newBound;
    root.hidden = !ages.ages.length;
    draw();
    showColumn(column ?? ages.x.length - 1);
  }

  function close() {
    resizes.disconnect();
    window.removeEventListener("themechange", draw);
  }

  return { root, update, close };
}
