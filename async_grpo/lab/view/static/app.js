// The page: which view the address names, the theme, and news of what runs write.
//
//   #/?q=...                the runs
//   #/compare?run=A&run=B   curves of several runs
//   #/sweeps                the sweeps; #/sweep/ID its report
//   #/run/ID/VIEW?...       a view of a run; what follows "?" belongs to the view
//
// A view is a function (root, name, parameters, changed) -> { refresh, close }. `refresh(files)` is called when a run
// has written to these files (views of several runs: when these runs have), `close` when the reader goes elsewhere.

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
let shown = null;

/** What the address names: kind, run or sweep, view, and parameters. */
function place() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const [, kind = "", name = "", view] = path.split("/");
  const parameters = new URLSearchParams(query);
  if (kind === "run" && name) return { kind, name: decoded(name), view: VIEWS[view] ? view : "overview", parameters };
  return { kind: PAGES[kind] ? kind : "", name: decoded(name), view: "", parameters };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function addressOf({ kind, name, view, parameters }) {
  const path = [kind, name, view].filter(Boolean).map(encodeURIComponent).join("/");
  return `#/${path}${String(parameters) && `?${parameters}`}`;
}

function show() {
  if (location.hash === "#main") return page.main.focus();
  const now = place();
  if (shown?.address === addressOf(now)) return;
  shown?.close();
  const { title } = now.kind === "run" ? VIEWS[now.view] : PAGES[now.kind];
  const label = now.name ? `${now.name.replaceAll("~", "/")}: ${title.toLowerCase()}` : title;
  document.title = `${label} · async-grpo`;
  page.title.textContent = label;
  page.live.textContent = "";
  showViews(now);
  shown = open(now);
}

function open(now) {
  const current = { address: addressOf(now) };
  const view = now.kind === "run" ? VIEWS[now.view] : PAGES[now.kind];
  const changed = (parameters) => {
    current.address = addressOf({ ...now, parameters });
    history.replaceState(null, "", current.address);
  };
  page.view.replaceChildren();
  const made = view.make(page.view, now.name, now.parameters, changed);
  const news = follow(now, (names) => {
    page.live.textContent = "live";
    if (!view.files || names.some((name) => view.files.test(name) || name === "run.lock")) made.refresh?.(names);
  });
  current.close = () => {
    news.close();
    made.close?.();
  };
  return current;
}

/** The stream of news: of one run's files, or of all runs. */
function follow({ kind, name }, tell) {
  const address = kind === "run" ? `/api/runs/${encodeURIComponent(name)}/events` : "/api/changes";
  const events = new EventSource(address);
  events.addEventListener(kind === "run" ? "rows" : "runs", (event) => tell(JSON.parse(event.data)));
  return events;
}

function showViews({ kind, name, view }) {
  const link = (href, title, isHere) => el("a", { href, "aria-current": isHere ? "page" : null }, title);
  const ofRun = Object.entries(VIEWS).map(([id, { title }]) => link(`#/run/${encodeURIComponent(name)}/${id}`, title, id === view));
  page.views.replaceChildren(
    link("#/", "Runs", kind === ""),
    link("#/sweeps", "Sweeps", kind === "sweeps"),
    ...(kind === "run" ? ofRun : []),
  );
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  page.theme.textContent = name === "dark" ? "Light" : "Dark";
  page.theme.setAttribute("aria-label", `${page.theme.textContent} theme`);
  window.dispatchEvent(new Event("themechange"));
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
theme(localStorage.getItem("theme") ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", () => localStorage.getItem("theme") ?? theme(prefersDark.matches ? "dark" : "light"));
page.theme.addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", other);
  theme(other);
});
window.addEventListener("hashchange", show);
show();
