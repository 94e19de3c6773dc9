// Curves over steps or time: of one run, or of several together, with the settings in which they differ.

import { COLOURS, loadCharts, makeChart, missingCharts, smoothValues, swatch } from "./charts.js";
import { el, fetchJson, nameOf, readAgain, scrollingTable, showError, stillReading } from "./dom.js";
import { isVarying } from "./series.js";

const OPEN_GROUPS = ["reward", "staleness", "idle", "speed", "rollout"];
const GROUP_TITLES = {
  reward: "Reward and held-out score",
  idle: "Who waits",
  cpu: "Processors",
  logprob_gap: "Log-probability gap",
  other: "Other metrics",
};
const AXES = { step: "optimizer step", time: "wall time" };

/** Curves of one run. */
export function curvesView(root, run, parameters, changed) {
  return groupedCurves(root, [run], parameters, changed);
}

/** Curves of the runs in the address, and the settings in which they differ. */
export function compareView(root, _, parameters, changed) {
  const runs = parameters.getAll("run");
  if (runs.length === 0) {
    const link = el("a", { href: "#/" }, "Choose some in the list of runs");
    root.replaceChildren(el("p", {}, "No runs are chosen. ", link, "."));
    return {};
  }

  const settings = el("section", { class: "differences" });
  const curves = el("div");
  root.replaceChildren(settings, curves);
  const query = new URLSearchParams(runs.map((run) => ["run", run]));
  fetchJson(`/api/differences?${query}`).then(
    (differences) => settings.replaceChildren(...differencesTable(runs, differences)),
    (error) => showError(settings, error),
  );
  return groupedCurves(curves, runs, parameters, changed);
}

function differencesTable(runs, differences) {
  if (runs.length < 2) return [];
  if (!differences.length) return [el("p", { class: "note" }, "Their settings are the same.")];

  const heads = ["Setting", ...runs.map(nameOf)].map((name) => el("th", { scope: "col" }, name));
  const rows = differences.map(({ key, values }) => {
    const cells = values.map((value) => el("td", {}, JSON.stringify(value)));
    return el("tr", {}, el("th", { scope: "row" }, key), cells);
  });
  return [el("h2", {}, "Settings that differ"), scrollingTable("Settings that differ", heads, rows)];
}

function groupedCurves(root, runs, parameters, changed) {
  const hiddenRuns = new Set();
  const charts = new Map(); // key of a metric -> { chart, title }
  const sections = new Map(); // group -> { details, grid }
  const legend = el("ul", { class: "legend", "aria-label": "Runs" });
  const status = el("p", { class: "status", role: "status" });
  const body = el("div");
  const controls = curveControls(parameters, (needsData) => {
    changed(parameters);
    if (needsData) refresh();
    else draw();
  });
  root.replaceChildren(controls.element, legend, status, body);

  let metrics = null;
  let answers = [];
  let request = 0;
  let timer = null;

  async function refresh() {
    const mine = ++request;
    try {
      metrics ??= await fetchJson("/api/metrics");
      if (!(await loadCharts(metrics.charts)) && !root.querySelector(".missing-charts")) root.prepend(missingCharts());
      const found = await fetchJson(`/api/curves?${curvesQuery()}`);
      // A later request has started meanwhile, for another axis or newer steps.
      if (mine !== request) return;

      answers = found;
      draw();
      clearTimeout(timer);
      timer = readAgain(shareRead(), refresh);
    } catch (error) {
      if (mine === request) status.textContent = error.message;
    }
  }

  function curvesQuery() {
    const query = new URLSearchParams(runs.map((run) => ["run", run]));
    for (const { metrics: members } of metrics.groups) {
      for (const metric of members) query.append("key", metric.key);
    }
    for (const { family } of metrics.families) query.append("key", `${family}.`);
    query.append("x", controls.axis());
    return query;
  }

  const shareRead = () => Math.min(...answers.map((run) => run.read));

  function draw() {
    if (!metrics) return;
    const hasCurves = answers.some((run) => Object.keys(run.curves).length);
    status.textContent = stillReading(shareRead()) || (hasCurves ? "" : "No step has been trained yet.");
    legend.replaceChildren(...(runs.length > 1 ? answers.map(legendItem) : []));

    drawHeldOut(metrics.held_out);
    for (const { group, metrics: members } of metrics.groups) {
      for (const metric of members) drawMetric(group, metric);
    }
    for (const family of metrics.families) drawFamily(family);
    applyFilter();
  }

  /** Held-out scores, next to the reward: sampled answers, and greedy ones as a second line. */
  function drawHeldOut({ title, unit, doc, series }) {
    const lines = answers.flatMap((run, index) =>
      series.map(({ key, label }, place) => {
        const scores = run.evaluations.filter((row) => typeof row[key] === "number");
        return {
          run: run.id,
          label: runs.length > 1 ? `${run.name}, ${label}` : label,
          x: scores.map((row) => row.x),
          y: scores.map((row) => row[key]),
          style: index + COLOURS * place,
          points: true,
        };
      }),
    );
    drawChart("reward", { key: "evaluation", label: title, unit, doc }, lines.filter((line) => line.x.length));
  }

  function drawMetric(group, metric) {
    const lines = answers.flatMap((run, index) => metricLines(run, index, metric.key));
    const isConstant = lines.every((line) => !isVarying(line.y));
    if (!(metric.only_if_varying && isConstant)) drawChart(group, metric, lines);
  }

  /** One chart per name of the family that any run has. */
  function drawFamily({ family, group, title, unit, doc, series }) {
    const isMember = (key) => key.startsWith(`${family}.`);
    const keys = new Set(answers.flatMap((run) => Object.keys(run.curves).filter(isMember)));
    // The score of a single reward function is the mean reward again.
    if (family === "reward_by_function" && keys.size === 1) return;

    for (const key of keys) {
      const name = series.find((each) => each.key === key)?.label ?? key.slice(family.length + 1);
      const lines = answers.flatMap((run, index) => metricLines(run, index, key));
      drawChart(group, { key, label: `${title}: ${name}`, unit, doc }, lines);
    }
  }

  function metricLines(run, index, key) {
    const curve = run.curves[key];
    if (!curve) return [];
    const [x, y] = curve;
    const label = runs.length > 1 ? run.name : "";
    const lines = [{ run: run.id, label, x, y: smoothValues(y, controls.half()), style: index, mean: run.means[key] }];

    const isFirstWithBound = answers.findIndex((other) => other.age_bound === run.age_bound) === index;
    if (key === "age_max" && run.age_bound !== null && isFirstWithBound) {
      lines.push({ run: run.id, label: "bound", x, y: x.map(() => run.age_bound), style: index + COLOURS });
    }
    return lines;
  }

  function drawChart(group, { key, label, unit, doc }, lines) {
    if (!lines.length) return;
    const spec = {
      title: label,
      unit,
      doc,
      axis: controls.axis(),
      log: controls.log(),
      lines: lines.map((line) => ({ ...line, hidden: hiddenRuns.has(line.run) })),
      marks: runs.length === 1 ? answers[0].evaluations.map((evaluation) => evaluation.x) : [],
    };
    if (charts.has(key)) {
      charts.get(key).chart.update(spec);
      return;
    }
    const chart = makeChart(spec);
    charts.set(key, { chart, title: `${label} ${key}`.toLowerCase() });
    sectionOf(group).grid.append(chart.root);
  }

  function sectionOf(group) {
    if (!sections.has(group)) {
      const grid = el("div", { class: "charts" });
      const title = GROUP_TITLES[group] ?? group.replaceAll("_", " ");
      const isOpen = OPEN_GROUPS.includes(group);
      const details = el("details", { class: "group", open: isOpen }, el("summary", {}, title), grid);
      body.append(details);
      sections.set(group, { details, grid });
    }
    return sections.get(group);
  }

  /** Show the charts whose title or key contains the text of the search, and open their groups. */
  function applyFilter() {
    const text = controls.find().toLowerCase();
    for (const { chart, title } of charts.values()) chart.root.hidden = !title.includes(text);
    for (const { details, grid } of sections.values()) {
      const hasMatch = [...grid.children].some((child) => !child.hidden);
      details.hidden = !hasMatch;
      if (text && hasMatch) details.open = true;
    }
  }

  function legendItem(run, index) {
    const toggle = () => {
      if (!hiddenRuns.delete(run.id)) hiddenRuns.add(run.id);
      draw();
      legend.querySelectorAll("button")[index]?.focus();
    };
    const isShown = String(!hiddenRuns.has(run.id));
    const button = el(
      "button",
      { type: "button", "aria-pressed": isShown, title: "Show or hide", onclick: toggle },
      swatch(index),
      ` ${run.name}`,
    );
    return el("li", {}, button, el("a", { href: `#/run/${encodeURIComponent(run.id)}/curves` }, "open"));
  }

  refresh();
  const close = () => {
    request += 1;
    clearTimeout(timer);
    for (const { chart } of charts.values()) chart.close();
  };
  return { refresh, close };
}

/** The toolbar. `onChange(needsData)`: the axis needs other data, everything else only a new drawing. */
function curveControls(parameters, onChange) {
  const axis = el("select", {}, Object.entries(AXES).map(([value, title]) => el("option", { value }, title)));
  axis.value = AXES[parameters.get("x")] ? parameters.get("x") : "step";
  const half = el("input", { type: "range", min: 0, max: 25, value: parameters.get("smooth") ?? 0 });
  const log = el("input", { type: "checkbox", checked: parameters.get("log") === "true" });
  const find = el("input", { type: "search", placeholder: "Metric", value: parameters.get("find") ?? "" });

  const update = (needsData) => {
    parameters.set("x", axis.value);
    parameters.set("smooth", half.value);
    parameters.set("log", log.checked);
    parameters.set("find", find.value);
    onChange(needsData);
  };
  axis.addEventListener("change", () => update(true));
  half.addEventListener("input", () => update(false));
  log.addEventListener("change", () => update(false));
  find.addEventListener("input", () => update(false));

  const element = el(
    "div",
    { class: "toolbar" },
    el("label", {}, "Find ", find),
    el("label", {}, "Over ", axis),
    el("label", {}, "Smoothing ", half),
    el("label", {}, log, " logarithmic"),
    el("span", { class: "note" }, "Drag to zoom, double click or Escape to see all; dotted lines are evaluations."),
  );
  return {
    element,
    axis: () => axis.value,
    half: () => Number(half.value),
    log: () => log.checked,
    find: () => find.value,
  };
}
