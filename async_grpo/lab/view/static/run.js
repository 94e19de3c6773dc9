// One run: its metrics and settings, its report, its logs. Also sweeps, which have reports too.

import { el, fetchJson, figure, readAgain, stillReading, visible } from "./dom.js";
import { duration } from "./runs.js";

const FACTS = [
  ["State", (run) => run.status],
  ["Steps", (run) => `${figure(run.step ?? 0, 0)} of ${figure(run.steps, 0)}`],
  ["Reward of the last step", (run) => figure(run.reward, 3)],
  ["Held-out score", (run) => heldOut(run.evaluations)],
  ["Oldest trained token", (run) => `${figure(run.age_max, 0)} steps (bound ${figure(run.age_bound, 0)})`],
  ["Tokens trained per second", (run, summary) => figure(summary.tokens_per_s ?? run.tokens_per_s, 0)],
  ["Duration", (run) => duration(run.duration_s)],
  ["Folder", (run) => run.path],
];

function heldOut(evaluations) {
  const scores = evaluations.map((row) => row.sampled_accuracy).filter((score) => typeof score === "number");
  if (!scores.length) return "not measured";
  return scores.length > 1 ? `${figure(scores[0], 3)} → ${figure(scores.at(-1), 3)}` : figure(scores[0], 3);
}

function failed(root) {
  return (error) => root.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
}

/** Metrics, warnings and settings. */
export function overviewView(root, name) {
  const path = `/api/runs/${encodeURIComponent(name)}`;
  let reading = null;
  let summary = {};

  async function refresh() {
    try {
      const run = await fetchJson(path);
      root.replaceChildren(...overview(run, summary));
      clearTimeout(reading);
      reading = readAgain(run.read, refresh);
      if (run.read < 1) return;
      summary = await fetchJson(`${path}/summary`);
      root.replaceChildren(...overview(run, summary));
    } catch (error) {
      failed(root)(error);
    }
  }

  refresh();
  return { refresh, close: () => clearTimeout(reading) };
}

function overview(run, summary) {
  const facts = FACTS.map(([title, value]) => el("div", { class: title === "Folder" ? "fact wide" : "fact" }, el("dt", {}, title), el("dd", {}, visible(value(run, summary)))));
  const warning = (row) => el("li", {}, visible(`${row.step === undefined ? "" : `step ${row.step}: `}${row.message}`));
  const restarts = Object.entries(summary.restarts ?? {}).filter(([, count]) => count > 0);
  return [
    run.reason ? el("p", { class: "error" }, visible(run.reason)) : null,
    run.read < 1 ? el("p", { class: "status" }, stillReading(run.read)) : null,
    summary.bottleneck ? el("p", {}, visible(summary.bottleneck)) : null,
    el("dl", { class: "facts" }, facts),
    restarts.length ? el("p", {}, `Restarts: ${restarts.map(([role, count]) => `${role} ${count}`).join(", ")}`) : null,
    run.warnings.length ? el("section", {}, el("h2", {}, `Warnings (${run.warnings.length})`), el("ul", {}, run.warnings.map(warning))) : null,
    el("h2", {}, "Settings"),
    settingsTable(run.settings),
  ].filter((part) => part !== null);
}

function settingsTable(settings) {
  const rows = flat(settings).map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, visible(JSON.stringify(value)))));
  return el("div", { class: "scroll settings", tabindex: "0", role: "region", "aria-label": "Settings" }, el("table", {}, el("tbody", {}, rows)));
}

function flat(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, path ? `${path}.${key}` : key));
}

/** A frame without scripts, as high as its content. */
function reportFrame(kind, name) {
  const theme = document.documentElement.dataset.theme;
  const src = `/reports/${kind}/${encodeURIComponent(name)}/report?theme=${theme}`;
  const frame = el("iframe", { class: "report", sandbox: "allow-same-origin allow-popups allow-popups-to-escape-sandbox allow-top-navigation-by-user-activation", src, title: `Report of ${name}` });
  const fit = () => (frame.height = frame.contentDocument.body.scrollHeight + 20);
  frame.addEventListener("load", () => {
    fit();
    frame.contentDocument.addEventListener("toggle", fit, true);
  });
  return frame;
}

/** report.md. */
export function reportView(root, name) {
  const nothing = el("p", {}, "There is no report yet: it is written when the run ends.");
  const refresh = () =>
    fetchJson(`/api/runs/${encodeURIComponent(name)}`).then((run) => root.replaceChildren(run.has_report ? reportFrame("runs", name) : nothing), failed(root));
  refresh();
  window.addEventListener("themechange", refresh);
  return { refresh, close: () => window.removeEventListener("themechange", refresh) };
}

/** The end of each role's log. */
export function logsView(root, name, parameters, changed) {
  const select = el("select", { onchange: () => (parameters.set("role", select.value), changed(parameters), refresh()) });
  const text = el("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log" });
  const path = `/api/runs/${encodeURIComponent(name)}`;
  root.replaceChildren(el("div", { class: "toolbar" }, el("label", {}, "Role ", select)), text);

  async function refresh() {
    try {
      const { logs } = await fetchJson(path);
      const role = logs.includes(parameters.get("role")) ? parameters.get("role") : logs[0];
      if (String(logs) !== String([...select.options].map((option) => option.value))) {
        select.replaceChildren(...logs.map((each) => el("option", { value: each }, each)));
      }
      if (!role) return text.replaceChildren("There are no logs: its roles were started one by one, or on other machines.");
      select.value = role;
      const found = await fetchJson(`${path}/logs/${encodeURIComponent(role)}`);
      const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 40;
      text.replaceChildren(...found.text.split("\n").flatMap((line) => [...visible(line), "\n"]));
      if (atEnd) text.scrollTop = text.scrollHeight;
    } catch (error) {
      text.textContent = error.message;
    }
  }

  refresh();
  return { refresh };
}

/** The sweeps below the folder. */
export function sweepsView(root) {
  const cells = (sweep) => [
    el("td", {}, el("a", { href: `#/sweep/${encodeURIComponent(sweep.id)}` }, sweep.name)),
    el("td", { class: "number" }, `${sweep.finished} of ${sweep.points}`),
    el("td", {}, sweep.recommended ?? "–"),
    el("td", { class: "number" }, new Date(1000 * sweep.changed_s).toLocaleString()),
  ];
  const heads = [["Sweep"], ["Runs finished", "number"], ["Recommended"], ["Last written", "number"]];
  const table = (found) =>
    el("table", {}, el("thead", {}, el("tr", {}, heads.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)))), el("tbody", {}, found.map((sweep) => el("tr", {}, cells(sweep)))));
  const box = (found) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sweeps" }, table(found));
  const none = el("p", {}, "There are no sweeps here: async-grpo sweep CONFIG --grid KEY=A,B makes one.");
  const refresh = () => fetchJson("/api/sweeps").then((found) => root.replaceChildren(found.length ? box(found) : none), failed(root));
  refresh();
  return { refresh };
}

/** The report of a sweep: table, plots and recommendation, and a link to the curves of its runs. An open report is not reloaded. */
export function sweepView(root, name) {
  async function show() {
    const sweep = (await fetchJson("/api/sweeps")).find((each) => each.id === name);
    if (!sweep) throw new Error(`There is no sweep ${name}: it may have been removed or renamed.`);
    const curves = el("a", { href: `#/compare?${new URLSearchParams(sweep.runs.map((run) => ["run", run]))}` }, `Curves of its ${sweep.runs.length} runs`);
    const report = sweep.has_report ? reportFrame("sweeps", name) : el("p", {}, "There is no report yet: it is written when the sweep ends.");
    root.replaceChildren(el("p", {}, sweep.runs.length ? curves : null), report);
  }
  const again = () => show().catch(failed(root));
  const refresh = () => root.querySelector("iframe") ?? again();
  again();
  window.addEventListener("themechange", again);
  return { refresh, close: () => window.removeEventListener("themechange", again) };
}
