// How old trained tokens were and how old they may be, who waited for whom, and what became of groups.

import { chart, loadCharts, missingCharts } from "./charts.js";
import { el, fetchJson, figure, readAgain, stillReading } from "./dom.js";

const CURVES = ["age_max", "age_mean", "idle.trainer", "idle.rollout", "buffer_groups.", "released_groups."];
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
      const { charts: built } = await fetchJson("/api/metrics");
      if (!(await loadCharts(built)) && !root.querySelector(".note")) root.prepend(missingCharts());
      const query = new URLSearchParams([["run", run], ...CURVES.map((key) => ["key", key])]);
      const [[curves], facts] = await Promise.all([fetchJson(`/api/curves?${query}`), fetchJson(`/api/runs/${path}/staleness`)]);
      if (mine !== request) return;
      show(curves, facts);
      clearTimeout(reading);
      reading = readAgain(curves.read, refresh);
    } catch (error) {
      if (mine === request) verdict.textContent = error.message;
    }
  }

  function show(curves, facts) {
    verdict.textContent = stillReading(curves.read) + sentence(curves);
    for (const spec of [ageChart(curves), idleChart(curves), groupsChart(curves, facts), releasedChart(curves)]) {
      if (!spec.lines.length) continue;
      if (charts.has(spec.title)) charts.get(spec.title).update(spec);
      else {
        charts.set(spec.title, chart(spec));
        grid.append(charts.get(spec.title).root);
      }
    }
    strip.update(facts.ages, curves.age_bound);
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

function line(curves, key, label, style, means = {}) {
  return curves[key] ? [{ label, x: curves[key][0], y: curves[key][1], style, mean: means[key] }] : [];
}

function ageChart({ curves, age_bound: bound }) {
  const lines = [...line(curves, "age_max", "oldest", 0), ...line(curves, "age_mean", "mean", 2)];
  const steps = curves.age_max?.[0] ?? [];
  if (bound !== null && steps.length) lines.push({ label: "bound", x: steps, y: steps.map(() => bound), style: 10 });
  return { title: "Age of trained tokens", unit: "steps", axis: "step", lines, doc: "Optimizer steps between generation and training." };
}

function idleChart({ curves, means }) {
  const lines = [...line(curves, "idle.trainer", "trainer", 0, means), ...line(curves, "idle.rollout", "rollout servers", 8, means)];
  return { title: "Idle share of both sides", unit: "share", axis: "step", lines, doc: "Trainer: waiting for a batch. Servers: generating nothing." };
}

function groupsChart({ curves }, { capacity }) {
  const lines = [...line(curves, "buffer_groups.inflight", "in flight", 0), ...line(curves, "buffer_groups.ready", "ready", 8)];
  if (capacity && lines.length) lines.push({ label: "capacity", x: lines[0].x, y: lines[0].x.map(() => capacity), style: 16 });
  return { title: "Groups in the buffer", unit: "groups", axis: "step", lines, doc: "After each step, when its groups were released." };
}

/** Every reason that any group has had, `trained` as well. */
function releasedChart({ curves }) {
  const reasons = Object.keys(curves).filter((key) => key.startsWith("released_groups.") && curves[key][1].at(-1) > 0);
  const lines = reasons.flatMap((key, place) => line(curves, key, key.slice(key.indexOf(".") + 1), 8 * place));
  return { title: "Groups released, by reason", unit: "groups", axis: "step", lines, doc: "Groups that left the buffer since the run began." };
}

function totalsTable(totals) {
  if (!totals) return [];
  const rows = Object.entries(totals).map(([reason, count]) => el("tr", {}, el("th", { scope: "row" }, reason), el("td", { class: "number" }, figure(count, 0))));
  return [el("h2", {}, "What became of the groups"), el("table", { class: "narrow" }, el("tbody", {}, rows))];
}

/** Which ages the tokens of each step had: a row for each age, the darker the larger its share. */
function ageStrip() {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Ages of tokens by step" });
  const read = el("p", { class: "status" });
  const root = el("section", { class: "age-strip", hidden: true }, el("h2", {}, "Ages of the trained tokens, by step"), canvas, read);
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
  const update = (ages, bound) => {
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
