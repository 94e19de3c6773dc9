// The page: the view of the address, the theme, and live updates when runs write files.
//
//   #/?q=...                the runs
//   #/compare?run=A&run=B   curves of several runs
//   #/sweeps                the sweeps; #/sweep/ID its report
//   #/run/ID/VIEW?...       a view of a run; what follows "?" belongs to the view
//
// A view is a function (root, name, parameters, changed) -> { refresh, close }. `refresh(names)` is called with the
// files that the run has written (views of several runs: with the ids of the changed runs), `close` before another view
// opens.

import { compareView, curvesView } from "./curves.js";
import { el, fetchJson, nameOf } from "./dom.js";
import { logsView } from "./logs.js";
import { overviewView } from "./overview.js";
import { reportView, sweepsView, sweepView } from "./reports.js";
import { runsView } from "./runs.js";
import { samplesView } from "./samples.js";
import { stalenessView } from "./staleness.js";
import { timelineView } from "./timeline.js";

const VIEWS = {
  overview: { title: "Overview", make: overviewView, files: /^(metrics|run\.|summary|evaluations)/ },
  curves: { title: "Curves", make: curvesView, files: /^(metrics|summary|evaluations)/ },
  staleness: { title: "Staleness", make: stalenessView, files: /^(metrics|summary)/ },
  samples: { title: "Samples", make: samplesView, files: /^(samples|trained)/ },
  timeline: { title: "Timeline", make: timelineView, files: /^timeline/ },
  report: { title: "Report", make: reportView, files: /^report/ },
  logs: { title: "Logs", make: logsView, files: /^logs/ },
};
const PAGES = {
  "": { title: "Runs", make: runsView },
  compare: { title: "Compare runs", make: compareView },
  sweeps: { title: "Sweeps", make: sweepsView },
  sweep: { title: "Sweep", make: sweepView },
};

const IDS = ["pages", "run-bar", "run-choice", "views", "live", "theme", "title", "view", "main"];
const page = Object.fromEntries(IDS.map((id) => [id, document.getElementById(id)]));
let openView = null;

/** The parts of the address: kind, name of the run or sweep, view, and parameters. */
function parseAddress() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const [, kind = "", name = "", view] = path.split("/");
  const parameters = new URLSearchParams(query);
  if (kind === "run" && name) {
    return { kind, name: decodePart(name), view: VIEWS[view] ? view : "overview", parameters };
  }
  return { kind: PAGES[kind] ? kind : "", name: decodePart(name), view: "", parameters };
}

function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function formatAddress({ kind, name, view, parameters }) {
  const path = [kind, name, view].filter(Boolean).map(encodeURIComponent).join("/");
  const query = String(parameters ?? "");
  return `#/${path}${query && `?${query}`}`;
}

function showAddress() {
  if (location.hash === "#main") {
    page.main.focus();
    return;
  }
  const target = parseAddress();
  if (openView?.address === formatAddress(target)) return;

  openView?.close();
  showTitle(target);
  showNavigation(target);
  page.live.textContent = "";
  openView = openTarget(target);
}

function openTarget(target) {
  const current = { address: formatAddress(target) };
  const view = viewOf(target);
  const changed = (parameters) => {
    current.address = formatAddress({ ...target, parameters });
    history.replaceState(null, "", current.address);
  };
  page.view.replaceChildren();
  const controls = view.make(page.view, target.name, target.parameters, changed);

  const events = followChanges(target, (names) => {
    page.live.textContent = "live";
    const concernsView = !view.files || names.some((name) => view.files.test(name) || name === "run.lock");
    if (concernsView) controls.refresh?.(names);
  });
  current.close = () => {
    events.close();
    controls.close?.();
  };
  return current;
}

const viewOf = ({ kind, view }) => (kind === "run" ? VIEWS[view] : PAGES[kind]);

/** Open the stream of changes of one run's files, or of all runs; `onChange` gets their names. */
function followChanges({ kind, name }, onChange) {
  const address = kind === "run" ? `/api/runs/${encodeURIComponent(name)}/events` : "/api/changes";
  const events = new EventSource(address);
  events.addEventListener(kind === "run" ? "rows" : "runs", (event) => onChange(JSON.parse(event.data)));
  return events;
}

function showTitle(target) {
  const { title } = viewOf(target);
  const parts = target.name ? [nameOf(target.name), " ", el("small", {}, title.toLowerCase())] : [title];
  page.title.replaceChildren(...parts);
  document.title = `${page.title.textContent} · async-grpo`;
}

function showNavigation({ kind, name, view }) {
  const link = (href, title, isCurrent) => el("a", { href, "aria-current": isCurrent ? "page" : null }, title);
  page.pages.replaceChildren(
    link("#/", "Runs", kind === "" || kind === "compare"),
    link("#/sweeps", "Sweeps", kind === "sweeps" || kind === "sweep"),
  );

  page["run-bar"].hidden = kind !== "run";
  if (kind !== "run") return;
  const viewLink = ([id, { title }]) => link(formatAddress({ kind, name, view: id }), title, id === view);
  page.views.replaceChildren(...Object.entries(VIEWS).map(viewLink));
  showRunChoice(name, view);
}

/** Fill the list that switches to the same view of another run. */
async function showRunChoice(name, view) {
  const choice = page["run-choice"];
  const fill = (names) => {
    choice.replaceChildren(...names.map((id) => el("option", { value: id }, nameOf(id))));
    choice.value = name;
  };
  choice.onchange = () => {
    location.hash = formatAddress({ kind: "run", name: choice.value, view });
  };
  if (choice.value !== name) fill([name]);
  const names = await fetchJson("/api/run-names").catch(() => []);
  const isStillOpen = parseAddress().name === name;
  if (isStillOpen && names.includes(name)) fill(names);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  page.theme.textContent = name === "dark" ? "Light" : "Dark";
  page.theme.setAttribute("aria-label", `${page.theme.textContent} theme`);
  window.dispatchEvent(new Event("themechange"));
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const systemTheme = () => (prefersDark.matches ? "dark" : "light");
setTheme(localStorage.getItem("theme") ?? systemTheme());
prefersDark.addEventListener("change", () => {
  if (localStorage.getItem("theme") === null) setTheme(systemTheme());
});
page.theme.addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", other);
  setTheme(other);
});
window.addEventListener("hashchange", showAddress);
showAddress();
