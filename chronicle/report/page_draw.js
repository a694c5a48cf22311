// How every plot looks, and how thousands of lines and marks are drawn as a few.
const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

const MANY = 200; // more lines or marks than this: what looks alike is one line with gaps, and neighbours are one mark
function merged(traces) {
  if (traces.length <= MANY) return traces;
  const found = new Map();
  for (const t of traces) {
    const key = t.mode === "markers" ? t : JSON.stringify([t.xaxis, t.yaxis, t.mode, t.line, t.opacity, t.hoverinfo]);
    let into = found.get(key);
    if (key === t || !into) found.set(key, into = key === t ? t : {
      ...t, x: [], y: [], text: [], customdata: [], showlegend: false, legendgroup: undefined,
      hovertemplate: t.hovertemplate && "%{text}<br>step %{customdata}<br>%{y:.5g}<extra></extra>",
    });
    if (key === t) continue;
    t.x.forEach((x, i) => { into.x.push(x); into.y.push(t.y[i]); into.text.push(t.text ?? t.name); into.customdata.push(t.customdata?.[i]); });
    for (const list of [into.x, into.y, into.text, into.customdata]) list.push(null);
  }
  return [...found.values()];
}
function apart(marks, x, look) { // of many marks that look alike those that a screen can tell apart; the tables have all
  if (marks.length <= MANY) return marks;
  const all = marks.filter((m) => x(m) !== null).sort((a, b) => x(a) - x(b)), last = new Map();
  const least = all.length ? (x(all.at(-1)) - x(all[0])) / 100 : 0;
  return all.filter((m) => {
    if (x(m) - (last.get(look(m)) ?? -Infinity) < least) return false;
    last.set(look(m), x(m));
    return true;
  });
}
// A plot keeps its zoom: the ranges that the reader chose are known by the plot's name and set again when it is drawn anew.
const nameOf = (element) => element.id || `${element.closest("[id]")?.id}/${element.dataset.name || element.previousElementSibling?.textContent}`;
function react(element, traces, extra) {
  const out = { ...extra }, zoom = state.zoom.get(nameOf(element));
  for (const key of Object.keys(out)) if (/^[xy]axis\d*$/.test(key)) out[key] = { ...out[key] };
  for (const [axis, range] of Object.entries(zoom?.axis === state.axis ? zoom.ranges : {})) if (out[axis]) out[axis].range = [...range];
  chart(element, merged(traces), out);
}
