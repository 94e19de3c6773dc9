// The overview of a run: is it learning, is it fast, is it sound, with the curves that show it; what to do next;
// warnings; and the settings that differ from their defaults.
//
//   /api/runs/ID          verdict, progress, settings    first, and again while the run is live
//   /api/curves           the curves of the blocks       after the answers are shown
//   /api/runs/ID/advice   the advice of `why`            last: it takes seconds for a long run

import { loadCharts, makeChart, missingCharts } from "./charts.js";
import { dateTime, duration, el, fetchJson, figure, percent, readAgain, runPath } from "./dom.js";
import { scrollingTable, showError, stillReading, visible, withCode } from "./dom.js";
import { keysOf, linesOf } from "./series.js";

const QUESTIONS = { learning: "Is it learning?", speed: "Is it fast?", soundness: "Is it sound?" };
const STATE_CLASSES = { yes: "good", check: "warn", no: "bad", "too early": "unknown" };
const LIVE_REFRESH_MS = 5000;
const ADVICE_EVERY_MS = 30_000;

/** The view of one run. */
export function overviewView(root, id) {
  const head = el("div", { class: "run-head" });
  const entries = Object.entries(QUESTIONS).map(([question, title]) => [question, answerBlock(title)]);
  const blocks = Object.fromEntries(entries);
  const answers = el("div", { class: "answers" }, Object.values(blocks).map((block) => block.root));
  const next = el("section", { class: "next" });
  const details = el("div");
  root.replaceChildren(head, answers, next, details);

  const charts = new Map();
  let metrics = null;
  let run = null;
  let advice = null;
  let advisedAt = -Infinity;
  let request = 0;
  let timer = null;

  async function refresh() {
    const mine = ++request;
    try {
      const found = await fetchJson(runPath(id));
      if (mine !== request) return;
      run = found;
      show();
      await refreshCurves(mine);
      if (mine !== request) return;
      clearTimeout(timer);
      timer = readAgain(run.read, refresh);
      if (run.read < 1) return;

      // A silent run writes nothing, so no event would show that its remaining time is unknown.
      if (run.status === "live") timer = setTimeout(refresh, LIVE_REFRESH_MS);
      await refreshAdvice(mine);
    } catch (error) {
      if (mine === request) showError(head, error);
    }
  }

  async function refreshCurves(mine) {
    metrics ??= await fetchJson("/api/metrics");
    if (!(await loadCharts(metrics.charts)) && !root.querySelector(".missing-charts")) answers.before(missingCharts());
    const keys = Object.values(metrics.overview).flat().flatMap(keysOf);
    const query = new URLSearchParams([["run", id], ...keys.map((key) => ["key", key])]);
    const [curves] = await fetchJson(`/api/curves?${query}`);
    if (mine !== request) return;

    for (const [question, specs] of Object.entries(metrics.overview)) {
      for (const spec of specs) drawChart(blocks[question].charts, spec, curves);
    }
  }

  function drawChart(grid, chart, curves) {
    const lines = linesOf(chart, curves, { age_bound: curves.age_bound });
    if (!lines.length) return;
    const spec = { ...chart, compact: true, axis: "step", lines };
    if (charts.has(chart.title)) {
      charts.get(chart.title).update(spec);
    } else {
      charts.set(chart.title, makeChart(spec));
      grid.append(charts.get(chart.title).root);
    }
  }

  async function refreshAdvice(mine) {
    if (performance.now() - advisedAt < ADVICE_EVERY_MS) return;
    advisedAt = performance.now();
    const found = await fetchJson(`${runPath(id)}/advice`);
    if (mine !== request) return;
    advice = found;
    next.replaceChildren(...nextStep(run, advice));
  }

  function show() {
    head.replaceChildren(...runHead(run));
    for (const answer of run.verdict) blocks[answer.question]?.update(answer);
    next.replaceChildren(...nextStep(run, advice));
    const isOpen = details.querySelector("details")?.open;
    details.replaceChildren(...warningsList(run), ...settingsTables(run, isOpen), folderLine(run));
  }

  refresh();
  const close = () => {
    request += 1;
    clearTimeout(timer);
    for (const chart of charts.values()) chart.close();
  };
  return { refresh, close };
}

/** A block with a question, its answer in a word and in sentences, and its charts. */
function answerBlock(title) {
  const badge = el("span", { class: "badge badge-unknown" }, "…");
  const text = el("p");
  const charts = el("div", { class: "charts" });
  const root = el("section", { class: "answer" }, el("h2", {}, title, " ", badge), text, charts);
  const update = (answer) => {
    badge.className = `badge badge-${STATE_CLASSES[answer.state]}`;
    badge.textContent = answer.state;
    text.replaceChildren(...withCode(answer.text));
  };
  return { root, charts, update };
}

function runHead(run) {
  const facts = [
    ["State", el("span", { class: `state state-${run.status}` }, run.status)],
    ["Steps", `${figure(run.step ?? 0, 0)} of ${figure(run.steps, 0)}`],
    ["Staleness S", figure(run.max_staleness, 0)],
    ["Duration", duration(run.duration_s)],
    ["Last written", dateTime(run.changed_s)],
  ];
  if (run.progress) facts.splice(2, 0, remainingTime(run.progress));
  const list = facts.map(([name, value]) => el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value)));
  const bar = el("progress", { max: run.steps ?? 1, value: run.step ?? 0, "aria-label": "Steps trained" });
  return [
    run.reason ? el("p", { class: "error" }, visible(run.reason)) : null,
    run.read < 1 ? el("p", { class: "status" }, stillReading(run.read)) : null,
    el("dl", { class: "facts" }, list),
    run.progress ? bar : null,
    run.progress?.waits
      ? el("p", { class: "waits" }, el("b", {}, "Recent steps: "), withCode(run.progress.waits))
      : null,
  ].filter(Boolean);
}

/** The remaining time, or the silence of a run whose remaining time is unknown. */
function remainingTime(progress) {
  if (progress.silent_s !== null) {
    return ["Left", el("span", { class: "warn" }, `unknown: no step for ${duration(progress.silent_s)}`)];
  }
  return ["Left", progress.left_s === null ? "–" : `about ${duration(progress.left_s)}`];
}

function nextStep(run, advice) {
  const lines = [el("p", {}, withCode(run.suggestion))];
  if (advice?.advice) {
    const steps = advice.steps ? `the last ${advice.steps} steps` : "all steps";
    const cause = `Most time of ${steps}: ${advice.cause}, ${percent(advice.share)}. `;
    lines.push(el("p", {}, el("b", {}, cause), withCode(advice.advice)));
  } else if (advice?.note) {
    lines.push(el("p", { class: "note" }, withCode(advice.note)));
  }
  return [el("h2", {}, "What to do next"), ...lines];
}

function warningsList(run) {
  const restarts = Object.entries(run.restarts).filter(([, count]) => count > 0);
  const items = run.warnings.map((row) => {
    const step = row.step === undefined ? "" : `step ${row.step}: `;
    return el("li", {}, visible(`${step}${row.message}`));
  });
  const counts = restarts.map(([role, count]) => `${role} ${count}`).join(", ");
  if (counts) items.unshift(el("li", {}, `Restarts: ${counts}`));
  if (!items.length) return [];
  return [el("section", { class: "warnings" }, el("h2", {}, "Warnings and restarts"), el("ul", {}, items))];
}

function settingsTables(run, isOpen) {
  const show = (value) => (value === null || value === undefined ? "–" : JSON.stringify(value));
  // A narrow screen breaks long keys after a dot or an underscore.
  const breakable = (key) => key.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]);
  const row = (key, values) => {
    const cells = values.map((value) => el("td", {}, visible(show(value))));
    return el("tr", {}, el("th", { scope: "row" }, breakable(key)), cells);
  };
  const heads = (...names) => names.map((name) => el("th", { scope: "col" }, name));

  const changed = run.changed_settings.map((setting) => row(setting.key, [setting.value, setting.default]));
  const all = flatten(run.settings).map(([key, value]) => row(key, [value]));
  return [
    el("h2", {}, "Settings that differ from the defaults"),
    changed.length
      ? scrollingTable("Settings that differ from the defaults", heads("Setting", "This run", "Default"), changed)
      : el("p", { class: "note" }, "None: every setting has its default."),
    el(
      "details",
      { open: isOpen },
      el("summary", {}, `All ${all.length} settings`),
      scrollingTable("All settings", heads("Setting", "This run"), all),
    ),
  ];
}

function flatten(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  return Object.entries(value).flatMap(([key, inner]) => flatten(inner, path ? `${path}.${key}` : key));
}

const folderLine = (run) => el("p", { class: "note" }, "Folder ", el("code", {}, visible(run.path)));
