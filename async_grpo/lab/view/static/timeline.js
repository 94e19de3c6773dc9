// The spans of each process on a canvas that zooms and pans, and the shares of the visible range.

import { el, fetchJson, figure, stillReading, visible } from "./dom.js";

const LANE = 15;
const DENSITY = 44;
const HEADER = 22;
const GUTTER = 8;
const LEAST_S = 1e-4;
const FETCH_MS = 60;
const BEHIND_MS = 1200;
const READ_MS = 100;
const KINDS = 7;
const WAITS = { ticket: "waits for room in the window", tasks: "waits for tasks" };
const KEYS = {
  ArrowLeft: ["pan", -0.2],
  ArrowRight: ["pan", 0.2],
  "+": ["zoom", 0.6],
  "=": ["zoom", 0.6],
  "-": ["zoom", 1 / 0.6],
  Home: ["whole", 0],
};

/** The view of a run's timeline. Returns `refresh`, called when the run has new rows, and `close`. */
export function timelineView(root, run) {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "timeline-help" });
  const tip = el("div", { class: "tip", hidden: true });
  const readout = el("div", { class: "readout", role: "status" });
  const kindsList = el("ul", { class: "legend", "aria-label": "Kinds of spans" });
  const state = { picture: null, range: null, selection: null, expand: new Set(), kinds: [], boxes: [], timer: 0, behind: 0, width: 0, fetching: null };
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
  const bar = el(
    "div",
    { class: "toolbar" },
    button("+", "Zoom in", () => zoom(0.6)),
    button("−", "Zoom out", () => zoom(1 / 0.6)),
    button("←", "Earlier", () => pan(-0.2)),
    button("→", "Later", () => pan(0.2)),
    button("Whole run", "Show the whole run", () => whole()),
    el("span", { id: "timeline-help" }, "Wheel or + and − zoom, dragging or the arrow keys move, Shift and dragging measure a range."),
  );
  const expanders = el("div", { class: "expanders" });
  const status = el("p", { class: "status", role: "status" });
  root.replaceChildren(bar, status, el("div", { class: "canvas-box" }, canvas, tip), expanders, kindsList, readout);

  const measure = () => (state.width = Math.max(200, canvas.clientWidth));
  const width = () => state.width || measure();
  const toPixel = (at) => ((at - state.range[0]) / (state.range[1] - state.range[0])) * width();
  const toSeconds = (pixel) => state.range[0] + (pixel / width()) * (state.range[1] - state.range[0]);

  function zoom(factor, around = width() / 2) {
    if (!state.range) return;
    const at = toSeconds(around);
    const span = Math.max(LEAST_S, (state.range[1] - state.range[0]) * factor);
    const share = around / width();
    move([at - span * share, at + span * (1 - share)]);
  }

  function pan(share) {
    if (!state.range) return;
    const by = share * (state.range[1] - state.range[0]);
    move([state.range[0] + by, state.range[1] + by]);
  }

  function whole() {
    state.range = null;
    state.selection = null;
    load();
  }

  function move([start, end]) {
    const long = state.picture.whole;
    if (end - start >= long) [start, end] = [0, long];
    else if (start < 0) [start, end] = [0, end - start];
    else if (end > long) [start, end] = [long - (end - start), long];
    state.range = [start, end];
    state.selection = null;
    draw();
    clearTimeout(state.timer);
    state.timer = setTimeout(load, FETCH_MS);
  }

  async function load() {
    state.fetching?.abort();
    state.fetching = new AbortController();
    try {
      clearTimeout(state.behind);
      const before = state.range;
      const seesAll = !before || (before[0] <= 0 && before[1] >= state.picture.whole);
      const picture = await ask(seesAll ? null : before, Math.min(5000, Math.max(50, Math.round(width()))), state.fetching.signal);
      const startedAgain = state.picture && picture.whole < state.picture.whole;
      state.picture = picture;
      if (startedAgain) return whole(); // the range was one of the run that had this folder before
      status.textContent = stillReading(picture.read);
      if (picture.behind) state.behind = setTimeout(load, picture.read < 1 ? READ_MS : BEHIND_MS);
      if (seesAll && state.range === before) state.range = [0, Math.max(LEAST_S, picture.whole)];
      learnKinds(picture);
      showExpanders(picture);
      draw();
      if (!state.selection) showShares(picture, state.range);
    } catch (error) {
      if (error.name !== "AbortError") readout.textContent = error.message;
    }
  }

  function ask(range, pixels, signal) {
    const query = new URLSearchParams({ pixels });
    if (range) {
      query.set("start", range[0]);
      query.set("end", range[1]);
    }
    for (const track of state.expand) query.append("expand", track);
    return fetchJson(`/api/runs/${encodeURIComponent(run)}/timeline?${query}`, { signal });
  }

  function learnKinds(picture) {
    const waits = (row, kind) => row.waits || (row.role === "trainer" && (kind === "wait" || kind === "start"));
    for (const row of picture.rows) {
      for (const span of row.spans ?? []) {
        const name = row.waits ? `wait: ${span[5]}` : row.track === row.role ? span[5] : row.track;
        span.kind = state.kinds.findIndex((kind) => kind.name === name);
        if (span.kind < 0) span.kind = state.kinds.push({ name, ...look(waits(row, span[5])) }) - 1;
      }
    }
    kindsList.replaceChildren(
      ...state.kinds.map((kind) => el("li", {}, el("span", { class: `swatch ${kind.color}` }), " ", visible(kind.name))),
    );
  }

  function look(waits) {
    const others = state.kinds.filter((kind) => !kind.waits).length;
    return { waits, color: waits ? "kind-wait" : `kind-${others % KINDS}` };
  }

  function showExpanders(picture) {
    const many = picture.rows.filter((row) => row.lanes > 6);
    const key = many.map((row) => `${row.role}/${row.track}`).join();
    if (expanders.dataset.key === key) return;
    expanders.dataset.key = key;
    expanders.replaceChildren(
      ...many.map((row) => {
        const name = `${row.role}/${row.track}`;
        const toggle = (event) => {
          if (event.target.checked) state.expand.add(name);
          else state.expand.delete(name);
          load();
        };
        return el("label", {}, el("input", { type: "checkbox", onchange: toggle }), ` show each of the ${row.lanes} lanes of `, visible(name));
      }),
    );
  }

  function showShares(picture, [start, end]) {
    const percent = (share) => `${figure(100 * share, share < 0.1 ? 1 : 0)} %`;
    const items = picture.shares.map(({ role, parts, idle }) => {
      const longest = [...parts].sort((a, b) => b.share - a.share).filter((part) => part.share >= 0.0005);
      const words = longest.map((part) => `${part.track === role ? part.kind : part.track === "wait" ? (WAITS[part.kind] ?? `wait: ${part.kind}`) : part.track} ${percent(part.share)}`);
      const label = role === "trainer" ? "waits for a batch" : "generates nothing";
      return el("li", {}, el("b", {}, visible(role)), idle === null ? ": " : `: ${label} ${percent(Math.max(0, idle))}; `, visible(words.join(", ")));
    });
    readout.replaceChildren(el("h3", {}, `From ${figure(start, 3)} s to ${figure(end, 3)} s (${figure(end - start, 3)} s)`), el("ul", {}, items));
  }

  function draw() {
    if (!state.picture || !state.range) return;
    measure(); // once a drawing: asking the page's layout for every span would take longer than drawing it
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = { text: color("--text"), muted: color("--muted"), line: color("--line"), accent: color("--accent") };
    const height = layout(state.picture);
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = width() * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    const fills = state.kinds.map((kind) => (kind.waits ? hatch(pen, color("--kind-wait")) : color(`--${kind.color}`)));
    state.boxes = [];
    for (const row of state.picture.rows) drawRow(pen, row, colors, fills);
    drawUpdates(pen, height, colors);
    drawAxis(pen, height, colors);
    canvas.setAttribute("aria-label", `Timeline of ${run}, ${figure(state.range[0], 3)} to ${figure(state.range[1], 3)} seconds`);
  }

  function layout(picture) {
    let y = HEADER;
    for (const row of picture.rows) {
      row.top = y + HEADER;
      row.height = row.density ? DENSITY : Math.max(1, row.lanes) * LANE;
      y = row.top + row.height;
    }
    return y + GUTTER;
  }

  function drawRow(pen, row, colors, fills) {
    if (row.density) drawDensity(pen, row, colors);
    for (const span of row.spans ?? []) {
      const from = toPixel(span[1]);
      const wide = Math.max(1, toPixel(span[2]) - from);
      if (from > width() || from + wide < 0) continue;
      const top = row.top + span[0] * LANE;
      pen.fillStyle = fills[span.kind] ?? colors.muted;
      pen.fillRect(from, top, wide, LANE - 2);
      state.boxes.push([from, top, wide, LANE - 2, row, span]);
    }
    pen.fillStyle = colors.text;
    pen.fillText(row.track === row.role ? row.role : `${row.role} · ${row.track}${row.density ? ` (${row.lanes} at most at once)` : ""}`, 4, row.top - 6);
  }

  function drawDensity(pen, row, colors) {
    const { start, end } = state.picture;
    const step = (end - start) / row.density.length;
    pen.fillStyle = colors.accent;
    row.density.forEach((open, place) => {
      const tall = (open / row.lanes) * DENSITY;
      const from = toPixel(start + place * step);
      pen.fillRect(from, row.top + DENSITY - tall, toPixel(start + (place + 1) * step) - from + 0.5, tall);
    });
    pen.strokeStyle = colors.line;
    pen.strokeRect(0.5, row.top + 0.5, width() - 1, DENSITY - 1);
  }

  function drawUpdates(pen, height, colors) {
    pen.strokeStyle = colors.text;
    pen.globalAlpha = 0.35;
    pen.setLineDash([3, 3]);
    let last = -Infinity;
    for (const span of state.picture.rows.filter((row) => row.weights).flatMap((row) => row.spans ?? [])) {
      const at = Math.round(toPixel(span[2])) + 0.5;
      if (at - last < 4 || at < 0 || at > width()) continue;
      last = at;
      pen.beginPath();
      pen.moveTo(at, HEADER);
      pen.lineTo(at, height);
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  function drawAxis(pen, height, colors) {
    const span = state.range[1] - state.range[0];
    const about = span / Math.max(2, width() / 110);
    const power = 10 ** Math.floor(Math.log10(about));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= about);
    pen.fillStyle = colors.muted;
    pen.strokeStyle = colors.line;
    for (let at = Math.ceil(state.range[0] / step) * step; at <= state.range[1]; at += step) {
      const x = Math.round(toPixel(at)) + 0.5;
      const label = `${Number(at.toPrecision(10))} s`;
      if (x + 3 + pen.measureText(label).width <= width()) pen.fillText(label, x + 3, 12);
      pen.strokeRect(x, 0, 0, 16);
    }
    if (state.selection) {
      const [from, to] = state.selection.map(toPixel);
      pen.fillStyle = colors.accent;
      pen.globalAlpha = 0.15;
      pen.fillRect(from, HEADER, to - from, height);
      pen.globalAlpha = 1;
    }
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function hover(event) {
    const [x, y] = point(event);
    const hit = state.boxes.findLast(([left, top, wide, tall]) => x >= left - 1 && x <= left + wide + 1 && y >= top && y <= top + tall);
    tip.hidden = !hit;
    if (!hit) return;
    const [, , , , row, span] = hit;
    const [, start, end, name, count, , args] = span;
    const facts = Object.entries(args ?? {}).map(([key, value]) => `${key} ${value}`);
    const title = count > 1 ? `${count} spans, mostly ${name}` : name;
    const lines = [`${row.role} · ${figure(start, 3)} s, ${figure(1000 * (end - start), 1)} ms`, facts.join(", ")];
    tip.replaceChildren(el("b", {}, visible(title)), ...lines.filter(Boolean).map((line) => el("div", {}, visible(line))));
    tip.style.left = `${Math.min(x + 12, width() - 180)}px`;
    tip.style.top = `${y + 14}px`;
  }

  canvas.addEventListener("wheel", (event) => (event.preventDefault(), zoom(Math.exp(event.deltaY / 400), point(event)[0])), { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const known = KEYS[event.key];
    if (!known || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    ({ pan, zoom, whole })[known[0]](known[1]);
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (!state.range) return;
    canvas.setPointerCapture(event.pointerId);
    state.drag = { x: point(event)[0], range: [...state.range], measures: event.shiftKey };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!state.drag) return hover(event);
    const x = point(event)[0];
    if (state.drag.measures) {
      state.selection = [toSeconds(state.drag.x), toSeconds(x)].sort((a, b) => a - b);
      draw();
    } else {
      const by = ((state.drag.x - x) / width()) * (state.drag.range[1] - state.drag.range[0]);
      move(state.drag.range.map((at) => at + by));
    }
  });
  canvas.addEventListener("pointerup", async () => {
    state.drag = null;
    const chosen = state.selection;
    if (chosen && chosen[1] > chosen[0]) showShares(await ask(chosen, 50), chosen);
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  const resized = new ResizeObserver(() => draw());
  resized.observe(canvas);
  window.addEventListener("themechange", draw);
  load();
  return {
    refresh: () => {
      const atEnd = !state.picture || !state.range || (state.range[0] === 0 && state.range[1] >= state.picture.whole - 1e-9);
      if (atEnd) state.range = null;
      load();
    },
    close: () => {
      state.fetching?.abort();
      clearTimeout(state.timer);
      clearTimeout(state.behind);
      resized.disconnect();
      window.removeEventListener("themechange", draw);
    },
  };
}

/** A pattern of stripes, which distinguishes waits from work without colour. */
function hatch(pen, color) {
  const tile = new OffscreenCanvas(6, 6);
  const part = tile.getContext("2d");
  part.strokeStyle = color;
  part.lineWidth = 2;
  for (const at of [-3, 3, 9]) {
    part.beginPath();
    part.moveTo(at - 3, 9);
    part.lineTo(at + 9, -3);
    part.stroke();
  }
  return pen.createPattern(tile, "repeat");
}
