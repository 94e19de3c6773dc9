// The lines of a chart of `telemetry.charts`, from the curves that the server sends: of one run, in the chart's own
// colours.

import { COLOURS } from "./charts.js";

/** Keys to request: those of the curves, or all names of a family. Limits are not in the answer: steps have none. */
export function keysOf({ family, series }) {
  return series.length ? series.map(({ key }) => key) : [`${family}.`];
}

/** The lines of a chart: its curves, its limits across, and its scores at the evaluations; or every name of its family
 * that has a value. `limits`: key -> number. */
export function linesOf({ family, series }, { curves, means, evaluations }, limits = {}) {
  if (!series.length) return familyLines(family, curves);

  const lines = [];
  for (const { key, label, style, only_if_varying: onlyIfVarying } of series) {
    const name = series.length > 1 ? label : "";
    const scores = evaluations.filter((row) => typeof row[key] === "number");
    if (scores.length) {
      lines.push({ label: name, x: scores.map((row) => row.x), y: scores.map((row) => row[key]), style, points: true });
    } else if (key in curves && (!onlyIfVarying || isVarying(curves[key][1]))) {
      lines.push({ label: name, x: curves[key][0], y: curves[key][1], style, mean: means[key] });
    }
  }
  if (!lines.length) return [];

  const { x } = lines[0];
  for (const { key, label, style } of series) {
    const limit = limits[key];
    if (limit !== null && limit !== undefined) lines.push({ label, x, y: x.map(() => limit), style });
  }
  return lines;
}

/** True if a curve has more than one value. */
export function isVarying(values) {
  return values.some((value) => value !== values[0]);
}

function familyLines(family, curves) {
  const keys = Object.keys(curves).filter((key) => key.startsWith(`${family}.`) && curves[key][1].at(-1) > 0);
  return keys.map((key, index) => ({
    label: key.slice(family.length + 1),
    x: curves[key][0],
    y: curves[key][1],
    style: (COLOURS + 1) * index,
  }));
}
