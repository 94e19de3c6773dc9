// Curves over steps or time: of one run, or of several together, with the settings in which they differ.

import { chart, COLOURS, loadCharts, missingCharts, smoothed, swatch } from "./charts.js";
import { el, fetchJson, readAgain, stillReading } from "./dom.js";

const OPEN = ["evaluation", "reward", "staleness", "idle", "speed", "rollout"];
const AXES = { step: "optimizer step", time: "wall time" };

/** Curves of one run. */
export function curvesView(root, run, parameters, changed) {
  return groupsOfCurves(root, [run], parameters, changed);
}

/** Curves of the runs in the address, and the settings in which they differ. */
export function compareView(root, _, parameters, changed) {
  const runs = parameters.getAll("run");
  if (runs.length === 0) {
    root.replaceChildren(el("p", {}, "No runs are chosen. ", el("a", { href: "#/" }, "Choose some in the list of runs"), "."));
    return {};
  }
  const settings = el("section", { class: "differences" });
  const curves = el("div");
  root.replaceChildren(settings, curves);
  const query = new URLSearchParams(runs.map((run) => ["run", run]));
  fetchJson(`/api/differences?${query}`).then(
    (found) => settings.replaceChildren(...differences(runs, found)),
    (error) => settings.replaceChildren(el("p", { class: "error", role: "alert" }, error.message)),
  );
  return groupsOfCurves(curves, runs, parameters, changed);
}

function differences(runs, found) {
  if (runs.length < 2) return [];
  if (!found.length) return [el("p", { class: "note" }, "Their settings are the same.")];
  const names = runs.map((run) => el("th", { scope: "col" }, run.replaceAll("~", "/")));
  const row = ({ key, values }) => el("tr", {}, el("th", { scope: "row" }, key), values.map((value) => el("td", {}, JSON.stringify(value))));
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"), names)), el("tbody", {}, found.map(row)));
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings that differ" }, table);
  return [el("h2", {}, "Settings that differ"), box];
}

function groupsOfCurves(root, runs, parameters, changed) {
  const hidden = new Set();
  const charts = new Map();
  const sections = new Map();
  const legend = el("ul", { class: "legend", "aria-label": "Runs" });
  const status = el("p", { class: "status", role: "status" });
  const body = el("div");
  const controls = curveControls(parameters, (refetch) => {
    changed(parameters);
    if (refetch) refresh();
    else draw();
  });
  root.replaceChildren(controls.element, legend, status, body);
  let metrics = null;
  let found = [];
  let request = 0;
  let reading = null;

  async function refresh() {
    const mine = ++request;
    try {
      metrics ??= await fetchJson("/api/metrics");
      if (!(await loadCharts(metrics.charts))) root.prepend(missingCharts());
      const keys = metrics.groups.flatMap((group) => group.metrics.map((metric) => metric.key));
      const query = new URLSearchParams([...runs.map((run) => ["run", run]), ...keys.map((key) => ["key", key]), ["x", controls.axis()]]);
      for (const { family } of metrics.families) query.append("key", `${family}.`);
      const answer = await fetchJson(`/api/curves?${query}`);
      if (mine !== request) return;
      found = answer;
      draw();
      clearTimeout(reading);
      reading = readAgain(readOf(found), refresh);
    } catch (error) {
      if (mine === request) status.textContent = error.message;
    }
  }

  function draw() {
    const none = found.some((run) => Object.keys(run.curves).length) ? "" : "No step has been trained yet.";
    status.textContent = stillReading(readOf(found)) || none;
    legend.replaceChildren(...found.map(legendItem));
    for (const { group, metrics: members } of [evaluationGroup(metrics.held_out), ...metrics.groups, ...metrics.families.map((chart) => byName(found, chart))]) {
      for (const metric of members) drawMetric(group, metric);
    }
  }

  function drawMetric(group, metric) {
    const lines = found.flatMap((run, index) => (metric.lines ?? plainLines)(run, index, metric)).map((line) => ({ ...line, hidden: hidden.has(line.run) }));
    if (!lines.length) return;
    const marks = runs.length === 1 ? found[0].evaluations.map((evaluation) => evaluation.x) : [];
    const spec = { title: metric.label, unit: metric.unit, doc: metric.doc, axis: controls.axis(), lines, marks };
    if (charts.has(metric.key)) return charts.get(metric.key).update(spec);
    const made = chart(spec);
    charts.set(metric.key, made);
    sectionOf(group).append(made.root);
  }

  function plainLines(run, index, metric) {
    const curve = run.curves[metric.key];
    if (!curve) return [];
    const lines = [{ run: run.id, label: run.name, x: curve[0], y: smoothed(curve[1], controls.half()), style: index, mean: run.means[metric.key] }];
    const bound = metric.key === "age_max" && run.age_bound !== null && found.findIndex((other) => other.age_bound === run.age_bound) === index;
    if (bound) lines.push({ run: run.id, label: "bound", x: curve[0], y: curve[0].map(() => run.age_bound), style: index + 7 });
    return lines;
  }

  function sectionOf(group) {
    if (!sections.has(group)) {
      const grid = el("div", { class: "charts" });
      body.append(el("details", { open: OPEN.includes(group) }, el("summary", {}, group.replaceAll("_", " ")), grid));
      sections.set(group, grid);
    }
    return sections.get(group);
  }

  function legendItem(run, index) {
    const toggle = () => {
      if (!hidden.delete(run.id)) hidden.add(run.id);
      draw();
      legend.querySelectorAll("button")[index]?.focus();
    };
    const button = el("button", { type: "button", "aria-pressed": String(!hidden.has(run.id)), title: "Show or hide", onclick: toggle }, swatch(index), ` ${run.name}`);
    return el("li", {}, button, runs.length > 1 ? el("a", { href: `#/run/${encodeURIComponent(run.id)}/curves` }, "open") : null);
  }

  refresh();
  const close = () => {
    request += 1;
    clearTimeout(reading);
    for (const each of charts.values()) each.close();
  };
  return { refresh, close };
}

const readOf = (runs) => Math.min(...runs.map((run) => run.read));

/** Held-out scores: sampled answers, and greedy ones as a second line. */
function evaluationGroup({ group, title, unit, doc, series }) {
  const lines = (run, index) =>
    series.flatMap(({ key, label }, place) => {
      const known = run.evaluations.filter((row) => typeof row[key] === "number");
      const line = { run: run.id, label: `${run.name}, ${label}`, x: known.map((row) => row.x), y: known.map((row) => row[key]), style: index + COLOURS * place, points: true };
      return known.length ? [line] : [];
    });
  return { group, metrics: [{ key: "evaluation", label: title, unit, doc, lines }] };
}

/** One chart per name of the family that any run has. */
function byName(found, { family, group, title, unit, doc, series }) {
  const keys = new Set(found.flatMap((run) => Object.keys(run.curves).filter((key) => key.startsWith(`${family}.`))));
  const label = (key) => series.find((one) => one.key === key)?.label ?? key.slice(family.length + 1);
  return { group, metrics: [...keys].map((key) => ({ key, label: `${title}: ${label(key)}`, unit, doc })) };
}

function curveControls(parameters, changed) {
  const axis = el("select", {}, Object.entries(AXES).map(([value, title]) => el("option", { value }, title)));
  axis.value = AXES[parameters.get("x")] ? parameters.get("x") : "step";
  const half = el("input", { type: "range", min: 0, max: 25, value: parameters.get("smooth") ?? 0 });
  const update = (refetch) => {
    parameters.set("x", axis.value);
    parameters.set("smooth", half.value);
    changed(refetch);
  };
  axis.addEventListener("change", () => update(true));
  half.addEventListener("input", () => update(false));
  const help = "Drag to zoom, double click or Escape to see all; dotted lines are evaluations.";
  const element = el("div", { class: "toolbar" }, el("label", {}, "Over ", axis), el("label", {}, "Smoothing ", half), el("span", { class: "note" }, help));
  return { element, axis: () => axis.value, half: () => Number(half.value) };
}
