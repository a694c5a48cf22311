// How every plot looks, and how thousands of lines and marks are drawn as a few.
const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function layout(extra) {
  const ink = css("--ink"), line = css("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const out = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "system-ui, DejaVu Sans, sans-serif", size: 12 },
    margin: { l: 60, r: 16, t: extra.height > 250 ? 28 : 10, b: 42 }, hovermode: "closest", modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") }, dragmode: "zoom",
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 }, ...extra,
  };
  for (const key of Object.keys(out)) if (/^[xy]axis\d*$/.test(key)) out[key] = { ...axis, ...out[key] };
  return out;
}
const config = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] };
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
const nameOf = (element) => element.id || `${element.closest("[id]")?.id}/${element.previousElementSibling?.textContent}`;
function listen(element) {
  element.on("plotly_relayout", (change) => {
    const zoom = state.zoom.get(nameOf(element))?.axis === state.axis ? state.zoom.get(nameOf(element)) : { axis: state.axis, ranges: {} };
    for (const key of Object.keys(change)) {
      const axis = /^([xy]axis\d*)\.(range|autorange)/.exec(key)?.[1];
      if (axis && change[`${axis}.autorange`]) delete zoom.ranges[axis];
      else if (axis) zoom.ranges[axis] = [...element.layout[axis].range];
    }
    state.zoom.set(nameOf(element), zoom);
  });
}
function react(element, traces, extra) {
  const out = layout(extra), zoom = state.zoom.get(nameOf(element)), first = !element.on;
  for (const [axis, range] of Object.entries(zoom?.axis === state.axis ? zoom.ranges : {})) out[axis] = { ...out[axis], range, autorange: false };
  const done = Plotly.react(element, merged(traces), out, { ...config, displayModeBar: extra.height > 250 && "hover" });
  if (first) listen(element);
  return done;
}
