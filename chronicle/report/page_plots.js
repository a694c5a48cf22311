// The plots of a run: lineage, channels, resumes, incidents, where the time went.
function lines(name, axes, options = {}) {
  const traces = [], curves = data.curves[name] || [];
  const few = curves.reduce((sum, c) => sum + (c.kept?.s.length || 0) + (c.gone?.s.length || 0), 0) < 120;
  const before = data.parent?.curves[name];
  if (before && state.axis === "step") traces.push({
    type: "scatter", mode: "lines", ...axes, x: before.s, y: before.v, line: { color: css("--soft"), width: 1.2 },
    name: escape(`run ${data.parent.name}`), showlegend: Boolean(options.legend), hovertemplate: `run ${escape(data.parent.name)}<br>step %{x}<br>${escape(name)} %{y:.5g}<extra></extra>`,
  });
  const width = state.smooth && span(curves) * state.smooth / 200;
  for (const curve of curves) {
    const l = launches.get(curve.launch);
    for (const [part, abandoned] of [["gone", true], ["kept", false]]) {
      if (!curve[part]) continue;
      const drift = !abandoned && (width ? { s: curve[part].s, v: smoothed(curve[part], width) } : curve.drift?.s.length > 1 && curve.drift);
      traces.push({
        type: "scatter", mode: few || curve[part].s.length === 1 ? "lines+markers" : "lines", ...axes,
        x: placeAll(l.number, curve[part].s), y: curve[part].v, customdata: curve[part].s, connectgaps: false,
        line: { color: abandoned ? grey() : l.colour, width: abandoned || drift ? 1 : 1.4 }, marker: { size: 4 }, opacity: drift ? 0.32 : 1,
        name: abandoned ? `launch ${l.number}, abandoned` : `launch ${l.number} ${l.lr}`,
        legendgroup: `launch ${l.number}`, showlegend: Boolean(options.legend) && !abandoned && !drift,
        hovertemplate: `launch ${l.number}${abandoned ? " (abandoned)" : ""}<br>step %{customdata}<br>${escape(name)} %{y:.5g}<extra></extra>`,
      });
      if (drift) traces.push({
        type: "scatter", mode: "lines", ...axes, x: placeAll(l.number, drift.s), y: drift.v, line: { color: l.colour, width: 2.2 },
        hoverinfo: "skip", name: `launch ${l.number} ${l.lr}`, showlegend: Boolean(options.legend), legendgroup: `launch ${l.number}`,
      });
    }
  }
  return traces;
}

const span = (curves) => { // steps from the first to the last point of a channel
  const ends = curves.flatMap((c) => (c.kept ? [c.kept.s[0], c.kept.s.at(-1)] : []));
  return ends.length ? Math.max(...ends) - Math.min(...ends) : 0;
};
function smoothed({ s, v }, width) { // the mean of the drawn points within `width` steps, at the ends fewer, to both sides alike
  const out = [];
  let low = 0, high = 0, sum = 0, count = 0;
  for (let i = 0; i < s.length; i++) {
    const near = Math.min(width, s[i] - s[0], s.at(-1) - s[i]);
    for (; high < s.length && s[high] <= s[i] + near; high++) if (number(v[high])) { sum += v[high]; count++; }
    for (; s[low] < s[i] - near; low++) if (number(v[low])) { sum -= v[low]; count--; }
    out.push(number(v[i]) && count ? sum / count : null);
  }
  return out;
}
// A logarithmic axis where it was asked for, or the data need it and nobody chose, and every value allows it.
const kindOf = (name) => ((state.log ?? data.spread.includes(name)) && (data.curves[name] || []).every((c) => [c.kept, c.gone].every((part) => !part || part.v.every((v) => v === null || v > 0))) ? "log" : "linear");
const rangeOf = (name) => (kindOf(name) === "log" ? undefined : data.ranges[name]);

function marks() {
  const shapes = [];
  const rule = (launch, step, colour, dash, width = 1) => {
    const x = place(launch, step);
    if (x === null) return;
    shapes.push({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: colour, width, dash }, opacity: 0.75, layer: "above" });
  };
  for (const r of data.rollbacks) rule(owner(r), r.to, css("--ink"), "dash");
  for (const r of data.restarts) rule(r.launch, r.step, grey(), "dot");
  for (const h of data.hardware) rule(owner(h), h.step, VIOLET, "solid");
  for (const i of data.incidents) if (i.onset !== null && i.tier !== "notice") rule(i.launch, i.onset, ALARM, "solid", 0.6);
  return apart(shapes, (s) => s.x0, (s) => s.line.color);
}

function heldOut(name) { // evaluation beside training: open circles
  const found = lines(name, { xaxis: "x", yaxis: "y2" }).filter((t) => t.hoverinfo !== "skip");
  return found.map((t, i) => ({
    ...t, mode: "lines+markers", line: { ...t.line, width: 1, dash: "dot" }, marker: { size: 7, open: true, color: t.line.color }, opacity: 1,
    name: `${escape(name)} (held out)`, legendgroup: name, showlegend: i === found.length - 1,
  }));
}

function lineage(element) {
  const loss = data.loss, n = Math.max(1, data.launches.length), rate = (data.curves[data.lr] || []).length > 0; // without one: no panel of it
  const traces = [
    ...(rate ? lines(data.lr, { xaxis: "x", yaxis: "y3" }) : []),
    ...(loss ? lines(loss, { xaxis: "x", yaxis: "y2" }, { legend: true }) : []),
    ...data.evals.flatMap(heldOut),
  ];
  const rows = new Map(data.launches.map((l, row) => [l.number, row]));
  const stopped = data.launches.map((l, row) => ({ l, row })).filter(({ l, row }) => l.stood !== null && row % data.every === 0);
  if (stopped.length) traces.push({
    type: "scatter", mode: "markers", name: "took no step", x: stopped.map(({ l }) => place(l.parent ?? owner({}), l.stood)), y: stopped.map(({ row }) => row),
    xaxis: "x", yaxis: "y", marker: { symbol: "x", size: 8, color: ALARM }, hoverinfo: "text",
    text: stopped.map(({ l }) => `launch ${l.number} took no step: ${escape(l.outcome)}`),
  });
  data.launches.forEach((l, row) => {
    if (l.start === null || row % data.every) return;
    const draw = (from, to, colour, width, name) => traces.push({
      type: "scatter", mode: "lines", x: [place(l.number, from), place(l.number, to)], y: [row, row], xaxis: "x", yaxis: "y",
      line: { color: colour, width }, hoverinfo: "text", text: name, showlegend: false, legendgroup: `launch ${l.number}`,
    });
    const about = `launch ${l.number}: steps ${l.start + 1}–${l.last ?? "?"}, LR ${l.lr} (${escape(l.why)}), ${escape(l.outcome)}${l.inferred ? ", parent inferred" : ""}`;
    if (l.last !== null && l.last > l.keptTo) draw(Math.max(l.keptTo, l.start), l.last, grey(), 3, `${about}, abandoned after ${l.keptTo}`);
    if (l.keptTo !== null && l.keptTo > l.start) draw(l.start, l.keptTo, l.colour, 7, about);
    const parent = rows.get(l.parent);
    if (parent !== undefined) traces.push({
      type: "scatter", mode: "lines", x: [place(l.parent, l.start), place(l.number, l.start)], y: [parent, row], xaxis: "x", yaxis: "y",
      line: { color: grey(), width: 1 }, hoverinfo: "skip", showlegend: false,
    });
  });
  const pin = (name, found, marker) => {
    if (!found.length) return;
    const shown = apart(found, (m) => m.x, () => name);
    traces.push({
      type: "scatter", mode: "markers", name, x: shown.map((m) => m.x), y: shown.map(() => 1), xaxis: "x", yaxis: "y4",
      marker, text: shown.map((m) => escape(m.title)), hoverinfo: "text", cliponaxis: false,
    });
  };
  const seen = (quiet) => data.incidents.filter((i) => i.onset !== null && (i.tier === "notice") === quiet).map((i) => ({ x: place(i.launch, i.onset), title: i.title }));
  pin("notice", seen(true), { symbol: "triangle-down", size: 8, color: css("--soft"), open: true });
  pin("incident", seen(false), { symbol: "triangle-down", size: 10, color: ALARM });
  pin("hardware", data.hardware.map((h) => ({ x: place(owner(h), h.step), title: h.title })), { symbol: "diamond", size: 9, color: VIOLET });
  const tree = loss || rate ? Math.min(0.4, 0.045 + 0.03 * n) : 0.92, top = rate ? 0.76 : 1, middle = loss ? tree + 0.04 : tree;
  react(element, traces, {
    height: (loss ? 480 : 150) + (rate ? 160 : 0) + 12 * Math.min(n, 40), margin: { t: 16 },
    xaxis: { title: { text: AXES[state.axis] }, anchor: "y" },
    yaxis: { domain: [0, tree], range: [n - 0.4, -0.6], tickvals: data.launches.map((_, i) => i).slice(0, 40), ticktext: data.launches.map((l) => `${l.number} ${l.lr}`).slice(0, 40) },
    ...(loss ? { yaxis2: { domain: [middle, top], title: { text: escape(loss) }, type: kindOf(loss), range: rangeOf(loss) } } : {}),
    ...(rate ? { yaxis3: { domain: [0.8, 1], title: { text: "LR" }, range: data.ranges[data.lr] } } : {}),
    yaxis4: { domain: [middle, top], range: [0, 1], visible: false },
    shapes: marks(),
  });
}

function channel(element, name, extra = {}) {
  react(element, lines(name, {}), {
    height: extra.height || 260, xaxis: { title: { text: AXES[state.axis] } },
    yaxis: { title: { text: extra.bare ? "" : escape(name) }, type: extra.log ? "log" : kindOf(name), range: extra.range || (extra.log ? undefined : rangeOf(name)) },
    shapes: extra.bare ? [] : marks(),
  });
}

function machine(element, name) { // from zero, a share up to 100: half a point of use is no mountain
  const values = (data.curves[name] || []).flatMap((c) => [...(c.kept?.v || []), ...(c.gone?.v || [])]);
  const [low, high] = extent([values], false), fits = low >= 0 && (!name.endsWith("%") || high <= 100);
  channel(element, name, { height: 200, bare: true, range: fits && state.log !== true ? [0, name.endsWith("%") ? 100 : 1.1 * high || 1] : undefined });
}

function resumes(element) {
  const traces = data.resumes.map((r) => ({
    type: "scatter", mode: "lines", x: r.x, y: r.y, name: `launch ${r.launch} at ${r.step}`, line: { width: 1.2, color: launches.get(r.launch).colour },
  }));
  react(element, traces, {
    height: 320, xaxis: { title: { text: "steps from the resume" }, zeroline: true, zerolinewidth: 2 }, yaxis: { title: { text: "loss − median before" } },
  });
}

function card(element, c) {
  const colour = c.tier === "notice" ? css("--soft") : ALARM;
  const shapes = [{ type: "line", x0: c.onset, x1: c.onset, yref: "paper", y0: 0, y1: 1, line: { color: colour, width: 1.4 } }];
  if (c.low !== null && c.low < c.onset) shapes.push({ type: "rect", x0: c.low, x1: c.onset, yref: "paper", y0: 0, y1: 1, fillcolor: colour, opacity: 0.15, line: { width: 0 } });
  for (const s of c.checkpoints) shapes.push({ type: "line", x0: s, x1: s, yref: "paper", y0: 0, y1: 0.08, line: { color: css("--soft"), width: 2 } });
  for (const s of c.chosen) shapes.push({ type: "line", x0: s, x1: s, yref: "paper", y0: 0, y1: 1, line: { color: css("--ink"), width: 1.2, dash: "dash" } });
  react(element, [{ type: "scatter", mode: "lines", x: c.curve.s, y: c.curve.v, line: { color: launches.get(c.launch).colour, width: 1.2 }, hovertemplate: "step %{x}<br>%{y:.5g}<extra></extra>" }],
    { height: 210, margin: { l: 44, r: 8, t: 6, b: 30 }, shapes, xaxis: {}, yaxis: {} });
}

function staircase(element) {
  const traces = [];
  for (const clock of data.clocks) {
    const [steps, times] = clock.time, l = launches.get(clock.launch);
    if (!steps.length || !l) continue;
    const hours = times.map((t) => (t - begin) / seconds), cut = steps.findIndex((step) => step > l.keptTo), end = cut < 0 ? steps.length : cut;
    const draw = (from, to, colour, name) => traces.push({
      type: "scatter", mode: "lines", x: hours.slice(from, to), y: steps.slice(from, to), line: { color: colour, width: 2 }, name,
    });
    draw(0, end, l.colour, `launch ${l.number}`);
    if (end < steps.length) draw(Math.max(0, end - 1), steps.length, grey(), `launch ${l.number}, lost`);
  }
  react(element, traces, { height: 320, xaxis: { title: { text: `${unit} since the first logged step` } }, yaxis: { title: { text: "step" } }, showlegend: false });
}
