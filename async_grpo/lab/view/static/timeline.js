// The spans of each process on a canvas that zooms and pans, and the shares of the visible range.
//
//   /timeline?start&end&pixels  -->  picture  --layoutRows-->  rows with top and height  --draw-->  canvas, boxes
//
// Moving and zooming draw the present picture at once; the one of the new range is fetched a moment later.

import { el, fetchJson, figure, percent, runPath, stillReading, visible } from "./dom.js";

const MIN_LANE = 15;
const MAX_LANE = 34;
const DENSITY_LANES = 3;
const ROW_TITLE = 22;
const AXIS_HEIGHT = 22;
const BOTTOM = 8;
const MANY_LANES = 6;
const MIN_RANGE_S = 1e-4;
const FETCH_MS = 60;
const BEHIND_MS = 1200;
const READ_MS = 100;

// Names and looks of spans: the same in every run, so that a colour means one thing.
const WORK = {
  pack: "kind-4",
  prox: "kind-6",
  reference: "kind-5",
  train: "kind-0",
  optimizer: "kind-3",
  publish: "kind-1",
  checkpoint: "kind-2",
  generation: "kind-4",
  weights: "kind-1",
  evaluation: "kind-6",
  process: "kind-limit",
  cpu: "kind-5",
};
const WAITS = {
  start: { look: "stripes-start", text: "starts" },
  wait: { look: "stripes-batch", text: "waits for a batch" },
  ticket: { look: "stripes-room", text: "waits for room in the window" },
  tasks: { look: "stripes-tasks", text: "waits for tasks" },
};
const STRIPES = {
  "stripes-start": { color: "--kind-limit", angles: [0] },
  "stripes-batch": { color: "--kind-wait", angles: [45] },
  "stripes-room": { color: "--kind-wait", angles: [135] },
  "stripes-tasks": { color: "--kind-3", angles: [90] },
  "stripes-away": { color: "--bad", angles: [45, 135] },
};
const TRACK_TEXTS = { cpu: "waits for a processor" };
const KEYS = {
  ArrowLeft: (actions) => actions.pan(-0.2),
  ArrowRight: (actions) => actions.pan(0.2),
  "+": (actions) => actions.zoom(0.6),
  "=": (actions) => actions.zoom(0.6),
  "-": (actions) => actions.zoom(1 / 0.6),
  Home: (actions) => actions.showWhole(),
};
const HELP = "Wheel or + and − zoom, dragging or the arrow keys move, Shift and dragging measure a range.";

/** The view of a run's timeline. Returns `refresh`, called when the run has new rows, and `close`. */
export function timelineView(root, run) {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-describedby": "timeline-help" });
  const tip = el("div", { class: "tip", hidden: true });
  const readout = el("div", { class: "readout", role: "status" });
  const legend = el("ul", { class: "legend", "aria-label": "Kinds of spans" });
  const expanders = el("div", { class: "expanders" });
  const status = el("p", { class: "status", role: "status" });
  const button = (text, label, onclick) => el("button", { type: "button", "aria-label": label, onclick }, text);
  const toolbar = el(
    "div",
    { class: "toolbar" },
    button("+", "Zoom in", () => zoom(0.6)),
    button("−", "Zoom out", () => zoom(1 / 0.6)),
    button("←", "Earlier", () => pan(-0.2)),
    button("→", "Later", () => pan(0.2)),
    button("Whole run", "Show the whole run", () => showWhole()),
    el("span", { id: "timeline-help", class: "note" }, HELP),
  );
  root.replaceChildren(toolbar, status, el("div", { class: "canvas-box" }, canvas, tip), expanders, legend, readout);

  const expanded = new Set(); // ROLE/TRACK whose lanes are drawn one by one
  let picture = null; // the server's last answer
  let range = null; // [start, end] in seconds; null for the whole run
  let selection = null; // [start, end] that the reader measures
  let drag = null; // { x, range, isMeasuring } while the pointer is down
  let boxes = []; // what was drawn where, for the tip
  let width = 0;
  let fetchTimer = 0;
  let behindTimer = 0;
  let fetching = null;

  const measureWidth = () => (width = Math.max(200, canvas.clientWidth));
  const span = () => range[1] - range[0];
  const toPixel = (seconds) => ((seconds - range[0]) / span()) * width;
  const toSeconds = (pixel) => range[0] + (pixel / width) * span();

  function zoom(factor, around = width / 2) {
    if (!range) return;
    const at = toSeconds(around);
    const length = Math.max(MIN_RANGE_S, span() * factor);
    const share = around / width;
    moveTo([at - length * share, at + length * (1 - share)]);
  }

  function pan(share) {
    if (range) moveTo(range.map((seconds) => seconds + share * span()));
  }

  function showWhole() {
    range = null;
    selection = null;
    load();
  }

  function moveTo([start, end]) {
    const whole = picture.whole;
    if (end - start >= whole) range = [0, whole];
    else if (start < 0) range = [0, end - start];
    else if (end > whole) range = [whole - (end - start), whole];
    else range = [start, end];
    selection = null;
    draw();
    clearTimeout(fetchTimer);
    fetchTimer = setTimeout(load, FETCH_MS);
  }

  const isWhole = () => !range || !picture || (range[0] <= 0 && range[1] >= picture.whole - 1e-9);

  async function load() {
    fetching?.abort();
    fetching = new AbortController();
    clearTimeout(behindTimer);
    if (!width) measureWidth();
    const before = range;
    const showsWhole = isWhole();
    try {
      const found = await fetchRange(showsWhole ? null : before, Math.min(5000, Math.round(width)), fetching.signal);
      const isOtherRun = picture && found.whole < picture.whole;
      picture = found;
      if (isOtherRun) {
        showWhole(); // the range was one of the run that had this folder before
        return;
      }
      if (showsWhole && range === before) range = [0, Math.max(MIN_RANGE_S, picture.whole)];
      showPicture();
    } catch (error) {
      if (error.name !== "AbortError") readout.textContent = error.message;
    }
  }

  function fetchRange(seconds, pixels, signal) {
    const query = new URLSearchParams({ pixels });
    if (seconds) {
      query.set("start", seconds[0]);
      query.set("end", seconds[1]);
    }
    for (const track of expanded) query.append("expand", track);
    return fetchJson(`${runPath(run)}/timeline?${query}`, { signal });
  }

  function showPicture() {
    status.textContent = stillReading(picture.read);
    if (picture.behind) behindTimer = setTimeout(load, picture.read < 1 ? READ_MS : BEHIND_MS);
    for (const row of picture.rows) {
      for (const piece of row.spans ?? []) piece.kind = describeKind(row, piece[5]);
    }
    showLegend();
    showExpanders();
    draw();
    if (!selection) showShares(picture, range);
  }

  function showLegend() {
    const kinds = new Map();
    for (const row of picture.rows) {
      for (const { kind } of row.spans ?? []) kinds.set(kind.text, kind.look);
    }
    if (picture.outages.length) kinds.set("away: died and was started again", "stripes-away");
    const items = [...kinds].map(([text, look]) => {
      return el("li", {}, el("span", { class: `swatch ${look}` }), " ", visible(text));
    });
    legend.replaceChildren(...items);
  }

  function showExpanders() {
    const rows = picture.rows.filter((row) => row.lanes > MANY_LANES);
    // Replacing a box would take the focus from a reader who has just ticked it.
    const key = rows.map((row) => `${row.role}/${row.track} ${row.lanes}`).join();
    if (expanders.dataset.key === key) return;
    expanders.dataset.key = key;
    const boxes = rows.map((row) => {
      const name = `${row.role}/${row.track}`;
      const toggle = (event) => {
        if (event.target.checked) expanded.add(name);
        else expanded.delete(name);
        load();
      };
      const box = el("input", { type: "checkbox", checked: expanded.has(name), onchange: toggle });
      return el("label", {}, box, ` show each of the ${row.lanes} lanes of `, visible(name));
    });
    expanders.replaceChildren(...boxes);
  }

  function showShares({ shares }, [start, end]) {
    const isAll = start <= 0 && end >= picture.whole - 1e-9;
    const length = `${figure(end - start, lengthDigits(end - start))} s`;
    const moments = [start, end].map((seconds) => `${formatSeconds(seconds, end - start)} s`);
    const title = isAll ? `Whole run: ${length}` : `From ${moments.join(" to ")} (${length})`;
    const items = shares.map((share) => {
      return el("li", {}, el("b", {}, visible(share.role)), visible(describeShares(share)));
    });
    const note = "Shares of this time. Activities of a role overlap, so they may add up to more than 100%.";
    readout.replaceChildren(el("h3", {}, title), el("ul", {}, items), el("p", { class: "note" }, note));
  }

  function draw() {
    if (!picture || !range) return;
    measureWidth(); // once per drawing: asking the page's layout for every span would take longer than drawing it
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = { text: color("--text"), muted: color("--muted"), line: color("--line"), accent: color("--accent") };
    const height = layoutRows(picture.rows, window.innerHeight);
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";

    const fills = new Map();
    const fillOf = (look) => {
      if (!fills.has(look)) fills.set(look, makeFill(pen, look, color));
      return fills.get(look);
    };
    boxes = [];
    for (const row of picture.rows) drawRow(pen, row, colors, fillOf);
    drawOutages(pen, fillOf("stripes-away"));
    drawWeightUpdates(pen, height, colors);
    drawAxis(pen, colors);
    drawSelection(pen, height, colors);
    const label = `${figure(range[0], 3)} to ${figure(range[1], 3)} seconds`;
    canvas.setAttribute("aria-label", `Timeline of ${run}, ${label}`);
  }

  function drawRow(pen, row, colors, fillOf) {
    if (row.density) drawDensity(pen, row, colors);
    const tall = row.laneHeight - 2;
    for (const piece of row.spans ?? []) {
      const left = toPixel(piece[1]);
      const wide = Math.max(1, toPixel(piece[2]) - left);
      if (left > width || left + wide < 0) continue;
      const top = row.top + piece[0] * row.laneHeight;
      pen.fillStyle = fillOf(piece.kind.look);
      pen.globalAlpha = row.track === "cpu" ? waitedShare(piece) : 1;
      pen.fillRect(left, top, wide, tall);
      pen.globalAlpha = 1;
      boxes.push({ left, top, wide, tall, row, piece });
    }
    pen.fillStyle = colors.text;
    pen.fillText(rowTitle(row), 4, row.top - 6);
  }

  function drawDensity(pen, row, colors) {
    const { start, end } = picture;
    const step = (end - start) / row.density.length;
    pen.fillStyle = colors.accent;
    row.density.forEach((open, index) => {
      const tall = (open / row.lanes) * row.height;
      const left = toPixel(start + index * step);
      pen.fillRect(left, row.top + row.height - tall, toPixel(start + (index + 1) * step) - left + 0.5, tall);
    });
    pen.strokeStyle = colors.line;
    pen.strokeRect(0.5, row.top + 0.5, width - 1, row.height - 1);
  }

  /** Cross out the time in which a role was away, over all its tracks. */
  function drawOutages(pen, fill) {
    for (const outage of picture.outages) {
      const rows = picture.rows.filter((row) => row.role === outage.role);
      const left = toPixel(outage.start);
      const wide = Math.max(2, toPixel(outage.end) - left);
      for (const row of rows) {
        pen.globalAlpha = 0.35;
        pen.fillStyle = fill;
        pen.fillRect(left, row.top, wide, row.height);
        pen.globalAlpha = 1;
        const piece = [0, outage.start, outage.end, "away: its process died and was started again", 1, "", null];
        boxes.push({ left, top: row.top, wide, tall: row.height, row, piece });
      }
    }
  }

  function drawWeightUpdates(pen, height, colors) {
    pen.strokeStyle = colors.text;
    pen.globalAlpha = 0.3;
    pen.setLineDash([3, 3]);
    let last = -Infinity;
    for (const row of picture.rows) {
      if (!row.weights) continue;
      for (const piece of row.spans ?? []) {
        const x = Math.round(toPixel(piece[2])) + 0.5;
        if (x - last < 4 || x < 0 || x > width) continue;
        last = x;
        drawLine(pen, x, AXIS_HEIGHT, height);
      }
      last = -Infinity;
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  function drawAxis(pen, colors) {
    const wanted = span() / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= wanted);
    pen.fillStyle = colors.muted;
    pen.strokeStyle = colors.line;
    for (let at = Math.ceil(range[0] / step) * step; at <= range[1]; at += step) {
      const x = Math.round(toPixel(at)) + 0.5;
      const label = `${Number(at.toPrecision(10))} s`;
      if (x + 3 + pen.measureText(label).width <= width) pen.fillText(label, x + 3, 12);
      drawLine(pen, x, 0, 16);
    }
  }

  function drawSelection(pen, height, colors) {
    if (!selection) return;
    const [left, right] = selection.map(toPixel);
    pen.fillStyle = colors.accent;
    pen.globalAlpha = 0.15;
    pen.fillRect(left, AXIS_HEIGHT, right - left, height);
    pen.globalAlpha = 1;
  }

  function pointerPosition(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function showTip(event) {
    const [x, y] = pointerPosition(event);
    const isHit = ({ left, top, wide, tall }) => x >= left - 1 && x <= left + wide + 1 && y >= top && y <= top + tall;
    const hit = boxes.findLast(isHit);
    tip.hidden = !hit;
    if (!hit) return;

    const [, start, end, name, count, , args] = hit.piece;
    const title = count > 1 ? `${count} spans, mostly ${name}` : name;
    const when = `${hit.row.role} · ${figure(start, 3)} s, ${formatLength(end - start)}`;
    const facts = Object.entries(args ?? {}).map(([key, value]) => `${key} ${value}`);
    const lines = [when, facts.join(", ")].filter(Boolean);
    tip.replaceChildren(el("b", {}, visible(title)), ...lines.map((line) => el("div", {}, visible(line))));
    tip.style.left = `${Math.min(x + 12, width - 180)}px`;
    tip.style.top = `${y + 14}px`;
  }

  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 400), pointerPosition(event)[0]);
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act({ pan, zoom, showWhole });
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (!range) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: pointerPosition(event)[0], range: [...range], isMeasuring: event.shiftKey };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      showTip(event);
      return;
    }
    const x = pointerPosition(event)[0];
    if (drag.isMeasuring) {
      selection = [toSeconds(drag.x), toSeconds(x)].sort((a, b) => a - b);
      draw();
    } else {
      const moved = ((drag.x - x) / width) * (drag.range[1] - drag.range[0]);
      moveTo(drag.range.map((seconds) => seconds + moved));
    }
  });
  canvas.addEventListener("pointerup", async () => {
    drag = null;
    const chosen = selection;
    if (chosen && chosen[1] > chosen[0]) showShares(await fetchRange(chosen, 50), chosen);
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  const resizes = new ResizeObserver(() => draw());
  resizes.observe(canvas);
  window.addEventListener("themechange", draw);
  load();

  function refresh() {
    // A reader who sees the whole run sees it grow; a reader who has zoomed in keeps the range.
    if (isWhole()) range = null;
    load();
  }

  function close() {
    fetching?.abort();
    clearTimeout(fetchTimer);
    clearTimeout(behindTimer);
    resizes.disconnect();
    window.removeEventListener("themechange", draw);
  }

  return { refresh, close };
}

/** Text and look of a kind of span. Spans of a server's wait track are named by what it waits for. */
function describeKind(row, name) {
  const isWait = row.waits || (row.role === "trainer" && row.track === row.role && name in WAITS);
  if (isWait) return WAITS[name] ?? { look: "stripes-room", text: `waits: ${name}` };
  const text = row.track === row.role ? name : row.track;
  return { look: WORK[text] ?? "kind-limit", text: TRACK_TEXTS[text] ?? text };
}

/** Share of a measured interval that the role waited for a processor; a half for several merged intervals. */
function waitedShare([, start, end, , count, , args]) {
  if (count > 1 || end <= start) return 0.5;
  return Math.min(1, Math.max(0.08, (args?.waited_s ?? 0) / (end - start)));
}

/** Set `top`, `height` and `laneHeight` of each row, so that the rows fill the screen. Returns the total height. */
function layoutRows(rows, screenHeight) {
  const lanesOf = (row) => (row.density ? DENSITY_LANES : Math.max(1, row.lanes));
  const lanes = rows.reduce((sum, row) => sum + lanesOf(row), 0);
  const available = 0.6 * screenHeight - AXIS_HEIGHT - BOTTOM - rows.length * ROW_TITLE;
  const laneHeight = Math.round(Math.min(MAX_LANE, Math.max(MIN_LANE, available / Math.max(1, lanes))));

  let y = AXIS_HEIGHT;
  for (const row of rows) {
    row.laneHeight = laneHeight;
    row.top = y + ROW_TITLE;
    row.height = lanesOf(row) * laneHeight;
    y = row.top + row.height;
  }
  return y + BOTTOM;
}

function rowTitle(row) {
  if (row.track === row.role) return row.role;
  const track = TRACK_TEXTS[row.track] ?? row.track;
  return `${row.role} · ${track}${row.density ? ` (${row.lanes} at most at once)` : ""}`;
}

/** `: waits for a batch 30%; train 60%, publish 10%` */
function describeShares({ role, parts, idle }) {
  const shown = [...parts].sort((a, b) => b.share - a.share).filter((part) => part.share >= 0.0005);
  const text = ({ track, kind }) => {
    if (track === role) return WAITS[kind]?.text ?? kind;
    if (track === "wait") return WAITS[kind]?.text ?? `waits: ${kind}`;
    return TRACK_TEXTS[track] ?? track;
  };
  const isIdlePart = (part) => role === "trainer" && part.track === role && part.kind === "wait";
  const list = shown.filter((part) => !isIdlePart(part)).map((part) => `${text(part)} ${formatShare(part.share)}`);
  if (idle === null) return `: ${list.join(", ")}`;
  const idleText = role === "trainer" ? WAITS.wait.text : "generates nothing";
  return `: ${idleText} ${formatShare(Math.max(0, idle))}; ${list.join(", ")}`;
}

const formatShare = (share) => percent(share, share < 0.1 ? 1 : 0);

/** Digits that distinguish moments of a range of this length. */
const lengthDigits = (seconds) => (seconds >= 100 ? 0 : seconds >= 10 ? 1 : 3);
const formatSeconds = (seconds, rangeS) => figure(seconds, lengthDigits(rangeS));

function formatLength(seconds) {
  return seconds < 1 ? `${figure(1000 * seconds, 1)} ms` : `${figure(seconds, 2)} s`;
}

function drawLine(pen, x, top, bottom) {
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, bottom);
  pen.stroke();
}

/** The fill of a look: a colour, or stripes, which distinguish waits from work without colour. */
function makeFill(pen, look, color) {
  const stripes = STRIPES[look];
  if (!stripes) return color(`--${look}`);

  const size = 8;
  const tile = new OffscreenCanvas(size, size);
  const tilePen = tile.getContext("2d");
  tilePen.strokeStyle = color(stripes.color);
  tilePen.lineWidth = 2;
  const lines = {
    0: [[0, 4, 8, 4]],
    90: [[4, 0, 4, 8]],
    // Diagonals continue beyond the edges, so that neighbouring tiles join.
    45: [[-4, 4, 4, 12], [0, 0, 8, 8], [4, -4, 12, 4]],
    135: [[-4, 4, 4, -4], [0, 8, 8, 0], [4, 12, 12, 4]],
  };
  for (const angle of stripes.angles) {
    for (const [x1, y1, x2, y2] of lines[angle]) {
      tilePen.beginPath();
      tilePen.moveTo(x1, y1);
      tilePen.lineTo(x2, y2);
      tilePen.stroke();
    }
  }
  return pen.createPattern(tile, "repeat");
}
