// The page: the view of the address, the theme, and live updates when runs write files.
//
//   #/?q=...                the runs
//   #/compare?run=A&run=B   curves of several runs
//   #/sweeps                the sweeps; #/sweep/ID its report
//   #/run/ID/VIEW?...       a view of a run; what follows "?" belongs to the view
//
// A view is a function (root, name, parameters, changed) -> { refresh, close }. `refresh(names)` is called with the files
// that the run has written (views of several runs: with the ids of the changed runs), `close` before another view opens.

import { compareView, curvesView } from "./curves.js";
import { el } from "./dom.js";
import { logsView, overviewView, reportView, sweepsView, sweepView } from "./run.js";
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

const page = Object.fromEntries(["views", "live", "theme", "title", "view", "main"].map((id) => [id, document.getElementById(id)]));
let openView = null;

/** The parts of the address: kind, name of the run or sweep, view, and parameters. */
function parseAddress() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const [, kind = "", name = "", view] = path.split("/");
  const parameters = new URLSearchParams(query);
  if (kind === "run" && name) return { kind, name: decodePart(name), view: VIEWS[view] ? view : "overview", parameters };
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
  return `#/${path}${String(parameters) && `?${parameters}`}`;
}

function showAddress() {
  if (location.hash === "#main") return page.main.focus();
  const target = parseAddress();
  if (openView?.address === formatAddress(target)) return;
  openView?.close();
  const { title } = target.kind === "run" ? VIEWS[target.view] : PAGES[target.kind];
  const label = target.name ? `${target.name.replaceAll("~", "/")}: ${title.toLowerCase()}` : title;
  document.title = `${label} · async-grpo`;
  page.title.textContent = label;
  page.live.textContent = "";
  showNavigation(target);
  openView = openTarget(target);
}

function openTarget(target) {
  const current = { address: formatAddress(target) };
  const view = target.kind === "run" ? VIEWS[target.view] : PAGES[target.kind];
  const changed = (parameters) => {
    current.address = formatAddress({ ...target, parameters });
    history.replaceState(null, "", current.address);
  };
  page.view.replaceChildren();
  const controls = view.make(page.view, target.name, target.parameters, changed);
  const events = followChanges(target, (names) => {
    page.live.textContent = "live";
    if (!view.files || names.some((name) => view.files.test(name) || name === "run.lock")) controls.refresh?.(names);
  });
  current.close = () => {
    events.close();
    controls.close?.();
  };
  return current;
}

/** Open the stream of changes of one run's files, or of all runs; `onChange` gets their names. */
function followChanges({ kind, name }, onChange) {
  const address = kind === "run" ? `/api/runs/${encodeURIComponent(name)}/events` : "/api/changes";
  const events = new EventSource(address);
  events.addEventListener(kind === "run" ? "rows" : "runs", (event) => onChange(JSON.parse(event.data)));
  return events;
}

function showNavigation({ kind, name, view }) {
  const link = (href, title, isCurrent) => el("a", { href, "aria-current": isCurrent ? "page" : null }, title);
  const runLinks = Object.entries(VIEWS).map(([id, { title }]) => link(`#/run/${encodeURIComponent(name)}/${id}`, title, id === view));
  page.views.replaceChildren(
    link("#/", "Runs", kind === ""),
    link("#/sweeps", "Sweeps", kind === "sweeps"),
    ...(kind === "run" ? runLinks : []),
  );
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  page.theme.textContent = name === "dark" ? "Light" : "Dark";
  page.theme.setAttribute("aria-label", `${page.theme.textContent} theme`);
  window.dispatchEvent(new Event("themechange"));
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem("theme") ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", () => localStorage.getItem("theme") ?? setTheme(prefersDark.matches ? "dark" : "light"));
page.theme.addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", other);
  setTheme(other);
});
window.addEventListener("hashchange", showAddress);
showAddress();
