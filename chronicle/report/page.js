"use strict";
// Draws the page from the JSON in #data with Plotly. Text of people is only ever set as text. Plots are drawn when they
// come into view, so that a long history opens at once. Keys: 1-4 choose the x axis, t the theme.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const launches = new Map(data.launches.map((l) => [l.number, l]));
  const GREY = "#a9afb8", AMBER = "#b07b17", ALARM = "#d0453f", VIOLET = "#8a57c0";
  const state = { axis: "step" };
  const plots = new Map(); // element -> draw function
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const begin = Math.min(...data.clocks.flatMap((c) => c.time[1].slice(0, 1)), Infinity);
  const end = Math.max(...data.clocks.flatMap((c) => c.time[1].slice(-1)), -Infinity);
  const [unit, seconds] = [["s", 1], ["min", 60], ["h", 3600], ["d", 86400]].findLast(([, size]) => end - begin >= 3 * size) || ["s", 1];
  const AXES = {
    step: "step", time: `wall clock (${unit})`, samples: "samples",
    flops: data.flopsEstimated ? "FLOPs (6 × parameters × tokens)" : "FLOPs",
  };

  // ---- the x axis -----------------------------------------------------------------------------------------------------
  const clocks = new Map(data.clocks.map((c) => [c.launch, c]));
  const has = (axis) => axis === "step" || data.clocks.some((c) => c[axis] && c[axis][0].length > 1);

  function interpolate([xs, ys], x) {
    if (!xs.length) return null;
    let low = 0, high = xs.length - 1;
    if (x <= xs[0]) return ys[0];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low] || 1);
  }

  function place(launch, step) {
    if (state.axis === "step" || step === null) return step;
    const table = clocks.get(launch)?.[state.axis];
    if (!table) return null;
    const value = interpolate(table, step);
    return state.axis === "time" && value !== null ? (value - begin) / seconds : value;
  }
  const placeAll = (launch, steps) => (state.axis === "step" ? steps : steps.map((s) => place(launch, s)));
  const owner = (mark) => mark.launch ?? data.launches[0]?.number ?? null;

  // ---- drawing --------------------------------------------------------------------------------------------------------
  function layout(extra) {
    const ink = css("--ink"), line = css("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    const out = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: "system-ui, DejaVu Sans, sans-serif", size: 12 },
      margin: { l: 60, r: 16, t: extra.height > 250 ? 28 : 10, b: 42 }, hovermode: "closest", modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft") }, dragmode: "zoom",
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
  function apart(shapes) {
    if (shapes.length <= MANY) return shapes;
    const xs = shapes.map((s) => s.x0), least = (xs.reduce((a, b) => Math.max(a, b)) - xs.reduce((a, b) => Math.min(a, b))) / 100, last = {};
    return shapes.sort((a, b) => a.x0 - b.x0).filter((s) => {
      if (s.x0 - (last[s.line.color] ?? -Infinity) < least) return false;
      last[s.line.color] = s.x0;
      return true;
    });
  }
  const react = (element, traces, extra) => Plotly.react(element, merged(traces), layout(extra), { ...config, displayModeBar: extra.height > 250 && "hover" });

  function lines(name, axes, options = {}) {
    const traces = [], curves = data.curves[name] || [];
    const few = curves.reduce((sum, c) => sum + c.kept.s.length + c.gone.s.length, 0) < 120;
    for (const curve of curves) {
      const l = launches.get(curve.launch);
      for (const [part, abandoned] of [["gone", true], ["kept", false]]) {
        if (!curve[part].s.length) continue;
        const drift = !abandoned && curve.drift?.s.length > 1;
        traces.push({
          type: "scatter", mode: few || curve[part].s.length === 1 ? "lines+markers" : "lines", ...axes,
          x: placeAll(l.number, curve[part].s), y: curve[part].v, customdata: curve[part].s, connectgaps: false,
          line: { color: abandoned ? GREY : l.colour, width: abandoned || drift ? 1 : 1.4 }, marker: { size: 4 }, opacity: drift ? 0.45 : 1,
          name: abandoned ? `launch ${l.number}, abandoned` : `launch ${l.number} ${l.lr}`,
          legendgroup: `launch ${l.number}`, showlegend: Boolean(options.legend) && !abandoned && !drift,
          hovertemplate: `launch ${l.number}${abandoned ? " (abandoned)" : ""}<br>step %{customdata}<br>${escape(name)} %{y:.5g}<extra></extra>`,
        });
        if (drift) traces.push({
          type: "scatter", mode: "lines", ...axes, x: placeAll(l.number, curve.drift.s), y: curve.drift.v, line: { color: l.colour, width: 2.2 },
          hoverinfo: "skip", name: `launch ${l.number} ${l.lr}`, showlegend: Boolean(options.legend), legendgroup: `launch ${l.number}`,
        });
      }
    }
    return traces;
  }
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  function marks() {
    const shapes = [];
    const rule = (launch, step, colour, dash, width = 1) => {
      const x = place(launch, step);
      if (x === null) return;
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: colour, width, dash }, opacity: 0.75, layer: "above" });
    };
    for (const r of data.rollbacks) rule(owner(r), r.to, AMBER, "dash");
    for (const r of data.restarts) rule(r.launch, r.step, GREY, "dot");
    for (const h of data.hardware) rule(owner(h), h.step, VIOLET, "solid");
    for (const i of data.incidents) if (i.onset !== null) rule(i.launch, i.onset, ALARM, "solid", 0.6);
    return apart(shapes);
  }

  function lineage(element) {
    const loss = data.loss, n = Math.max(2, data.launches.length);
    const traces = [
      ...lines("lr", { xaxis: "x", yaxis: "y3" }),
      ...(loss ? lines(loss, { xaxis: "x", yaxis: "y2" }, { legend: true }) : []),
    ];
    const rows = new Map(data.launches.map((l, row) => [l.number, row]));
    data.launches.forEach((l, row) => {
      if (l.start === null) return;
      const draw = (from, to, colour, width, name) => traces.push({
        type: "scatter", mode: "lines", x: [place(l.number, from), place(l.number, to)], y: [row, row], xaxis: "x", yaxis: "y",
        line: { color: colour, width }, hoverinfo: "text", text: name, showlegend: false, legendgroup: `launch ${l.number}`,
      });
      const about = `launch ${l.number}: steps ${l.start + 1}–${l.last ?? "?"}, LR ${l.lr} (${escape(l.why)}), ${escape(l.outcome)}`;
      if (l.last !== null && l.last > l.keptTo) draw(Math.max(l.keptTo, l.start), l.last, GREY, 3, `${about}, abandoned after ${l.keptTo}`);
      if (l.keptTo !== null && l.keptTo > l.start) draw(l.start, l.keptTo, l.colour, 7, about);
      const parent = rows.get(l.parent);
      if (parent !== undefined) traces.push({
        type: "scatter", mode: "lines", x: [place(l.parent, l.start), place(l.number, l.start)], y: [parent, row], xaxis: "x", yaxis: "y",
        line: { color: GREY, width: 1 }, hoverinfo: "skip", showlegend: false,
      });
    });
    const pins = data.incidents.filter((i) => i.onset !== null);
    traces.push({
      type: "scatter", mode: "markers", name: "incident", x: pins.map((i) => place(i.launch, i.onset)), y: pins.map(() => 1), xaxis: "x", yaxis: "y4",
      marker: { symbol: "triangle-down", size: 10, color: ALARM }, text: pins.map((i) => escape(i.title)), hoverinfo: "text", cliponaxis: false,
    });
    traces.push({
      type: "scatter", mode: "markers", name: "hardware", x: data.hardware.map((h) => place(owner(h), h.step)), y: data.hardware.map(() => 1), xaxis: "x", yaxis: "y4",
      marker: { symbol: "diamond", size: 9, color: VIOLET }, text: data.hardware.map((h) => escape(h.title)), hoverinfo: "text", cliponaxis: false,
    });
    const tree = Math.min(0.4, 0.1 + 0.018 * n);
    react(element, traces, {
      height: 640 + 12 * Math.min(n, 40),
      xaxis: { title: { text: AXES[state.axis] }, anchor: "y" },
      yaxis: { domain: [0, tree], range: [n - 0.4, -0.6], tickvals: data.launches.map((_, i) => i).slice(0, 40), ticktext: data.launches.map((l) => `${l.number} ${l.lr}`).slice(0, 40) },
      yaxis2: { domain: [tree + 0.04, 0.76], title: { text: escape(loss || "") }, range: loss ? data.ranges[loss] : undefined },
      yaxis3: { domain: [0.8, 1], title: { text: "LR" }, range: data.ranges.lr, exponentformat: "e" },
      yaxis4: { domain: [tree + 0.04, 0.76], overlaying: "y2", range: [0, 1], visible: false, fixedrange: true },
      shapes: marks(),
    });
  }

  function channel(element, name, extra = {}) {
    react(element, lines(name, {}), {
      height: extra.height || 260, xaxis: { title: { text: AXES[state.axis] } },
      yaxis: { title: { text: escape(name) }, type: extra.log ? "log" : "linear", exponentformat: "e", range: extra.log ? undefined : data.ranges[name] },
      shapes: extra.bare ? [] : marks(),
    });
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
    const shapes = [{ type: "line", x0: c.onset, x1: c.onset, yref: "paper", y0: 0, y1: 1, line: { color: ALARM, width: 1.4 } }];
    if (c.low !== null && c.low < c.onset) shapes.push({ type: "rect", x0: c.low, x1: c.onset, yref: "paper", y0: 0, y1: 1, fillcolor: ALARM, opacity: 0.15, line: { width: 0 } });
    for (const s of c.checkpoints) shapes.push({ type: "line", x0: s, x1: s, yref: "paper", y0: 0, y1: 0.08, line: { color: css("--soft"), width: 2 } });
    for (const s of c.chosen) shapes.push({ type: "line", x0: s, x1: s, yref: "paper", y0: 0, y1: 1, line: { color: AMBER, width: 1.4, dash: "dash" } });
    react(element, [{ type: "scatter", mode: "lines", x: c.curve.s, y: c.curve.v, line: { color: launches.get(c.launch).colour, width: 1.2 }, hovertemplate: "step %{x}<br>%{y:.5g}<extra></extra>" }],
      { height: 210, margin: { l: 44, r: 8, t: 6, b: 30 }, shapes, xaxis: {}, yaxis: {} });
  }

  const SHADES = ["#2f6fb0", "#d9822b", "#3c9a5f", "#b0506f", "#7a5fb5", "#20938f", "#a4742d", "#5a6f9e"];
  const faint = (colour) => `${colour}2e`;

  function study(element, panel, channel) {
    const found = panel.curves.filter((c) => c.channel === channel), arms = [...new Set(panel.curves.map((c) => c.arm))], traces = [];
    for (const c of found) {
      const colour = SHADES[arms.indexOf(c.arm) % SHADES.length], rows = c.x.map((_, i) => i).filter((i) => c.low[i] != null && c.high[i] != null);
      if (rows.length) traces.push({
        type: "scatter", mode: "lines", x: [...rows.map((i) => c.x[i]), ...rows.map((i) => c.x[i]).reverse()],
        y: [...rows.map((i) => c.high[i]), ...rows.map((i) => c.low[i]).reverse()], fill: "toself", fillcolor: faint(colour),
        line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: c.arm,
      });
      traces.push({
        type: "scatter", mode: c.x.length < 40 ? "lines+markers" : "lines", x: c.x, y: c.mean, name: escape(c.arm), legendgroup: c.arm,
        line: { color: colour, width: 1.8 }, marker: { size: 4 }, hovertemplate: `${escape(c.arm)}<br>%{x}: %{y:.5g}<extra></extra>`,
      });
    }
    const shapes = panel.marks.map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: GREY, width: 1, dash: "dot" }, layer: "between" }));
    if (channel === "difference" && panel.margin) for (const y of [panel.margin, -panel.margin])
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: AMBER, width: 1, dash: "dash" }, layer: "between" });
    react(element, traces, { height: 320, xaxis: { title: { text: escape(panel.x) } }, yaxis: { title: { text: escape(panel.unit) } }, shapes });
  }

  function contrasts(element, panel) {
    const rows = panel.contrasts.filter((c) => c.mean !== null), ys = rows.map((_, i) => i);
    const side = (name, sign) => rows.map((c) => (c[name] === null ? 0 : sign * (c[name] - c.mean)));
    react(element, [{
      type: "scatter", mode: "markers", x: rows.map((c) => c.mean), y: ys, marker: { size: 9, color: css("--accent") },
      error_x: { type: "data", symmetric: false, array: side("high", 1), arrayminus: side("low", -1), color: css("--accent") },
      text: rows.map((c) => `${escape(c.name)}: ${escape(c.verdict)}`), hovertemplate: "%{text}<br>%{x:.4g}<extra></extra>", showlegend: false,
    }], {
      height: 120 + 34 * rows.length, yaxis: { tickvals: ys, ticktext: rows.map((c) => escape(c.name)), range: [rows.length - 0.4, -0.6] },
      xaxis: { title: { text: `difference (${escape(panel.unit)})` }, zeroline: true, zerolinewidth: 2 },
      shapes: panel.margin ? [{ type: "rect", x0: -panel.margin, x1: panel.margin, yref: "paper", y0: 0, y1: 1, fillcolor: AMBER, opacity: 0.12, line: { width: 0 }, layer: "below" }] : [],
    });
  }

  function progress(element) {
    const p = data.progress;
    react(element, [{ type: "scatter", mode: "lines", x: p.s, y: p.v, line: { color: css("--accent"), width: 2 }, hovertemplate: "step %{x}<br>%{y:.5g}<extra></extra>" }],
      { height: 280, xaxis: { title: { text: "step (lineage only)" } }, yaxis: { title: { text: `${escape(data.loss || "loss")}, rolling median` } } });
  }

  function staircase(element) {
    const traces = [];
    for (const s of data.staircase) {
      if (!s.s.length) continue;
      const hours = s.t.map((t) => (t - begin) / seconds), l = launches.get(s.launch);
      const cut = s.limit === null ? s.s.length : s.s.findIndex((v) => v > s.limit);
      const end = cut < 0 ? s.s.length : cut;
      traces.push({ type: "scatter", mode: "lines", x: hours.slice(0, end), y: s.s.slice(0, end), line: { color: l.colour, width: 2 }, name: `launch ${s.launch}` });
      if (end < s.s.length) traces.push({ type: "scatter", mode: "lines", x: hours.slice(Math.max(0, end - 1)), y: s.s.slice(Math.max(0, end - 1)), line: { color: GREY, width: 2 }, name: `launch ${s.launch}, lost`, showlegend: false });
    }
    react(element, traces, { height: 320, xaxis: { title: { text: `${unit} since the first logged step` } }, yaxis: { title: { text: "step" } }, showlegend: false });
  }

  // ---- wiring ---------------------------------------------------------------------------------------------------------
  const observer = new IntersectionObserver((seen) => {
    for (const entry of seen) if (entry.isIntersecting) { observer.unobserve(entry.target); if (waiting.push(entry.target) === 1) drawNext(); }
  }, { rootMargin: "300px" });
  const waiting = []; // in view and not drawn: one plot at a time, so that the first is seen before the others are begun
  function drawNext() {
    if (!waiting[0].dataset.drawn) drawNow(waiting[0]);
    setTimeout(() => { waiting.shift(); if (waiting.length) drawNext(); }, 0);
  }
  function drawNow(element) {
    element.dataset.drawn = "yes";
    plots.get(element)();
  }
  function add(element, draw) {
    if (!element) return;
    plots.set(element, () => draw(element));
    observer.observe(element);
  }
  function redraw() {
    for (const [element, draw] of plots) if (element.dataset.drawn) draw();
  }
  function box(parent, title) {
    const holder = document.createElement("div"), heading = document.createElement("h3"), plot = document.createElement("div");
    holder.className = "card";
    heading.textContent = title;
    plot.className = "plot";
    holder.append(heading, plot);
    parent.append(holder);
    return plot;
  }
  function note(parent, text, warn) {
    const p = document.createElement("p");
    p.textContent = text;
    if (warn) p.className = "warn";
    parent.append(p);
  }
  const byId = (id) => document.getElementById(id);

  add(byId("plot-lineage"), lineage);
  if (data.resumes.length) add(byId("plot-resumes"), resumes);
  if (data.progress.s.length) add(byId("plot-progress"), progress);
  if (data.staircase.some((s) => s.s.length)) add(byId("plot-staircase"), staircase);
  const cards = byId("cards");
  if (cards) for (const c of data.cards) add(box(cards, c.title), (element) => card(element, c));
  const sources = byId("sources");
  if (sources) for (const name of data.groups.sources) add(box(sources, name), (element) => channel(element, name, { height: 220, bare: true }));
  const health = byId("health");
  if (health) {
    if (data.loss && data.groups.health.length) add(box(health, data.loss), (element) => channel(element, data.loss, { height: 220 }));
    for (const name of data.groups.health) add(box(health, `${name} (log)`), (element) => channel(element, name, { height: 220, log: true }));
  }
  const CHANNEL_TITLES = { loss: "training loss", eval: "held out", difference: "held out, minus the reference at the same seed" };
  for (const panel of data.studies) {
    const holder = byId(`study-${panel.anchor}`);
    if (!holder) continue;
    for (const name of new Set(panel.curves.map((c) => c.channel)))
      add(box(holder, CHANNEL_TITLES[name] || name), (element) => study(element, panel, name));
    if (panel.contrasts.some((c) => c.mean !== null)) add(box(holder, "contrasts"), (element) => contrasts(element, panel));
  }
  const chooser = byId("channel");
  if (chooser) {
    for (const name of data.channels) {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      chooser.append(option);
    }
    const jumped = data.resumes.flatMap((r) => r.shifts).sort((a, b) => Math.abs(b.sigmas) - Math.abs(a.sigmas))[0];
    chooser.value = jumped ? jumped.channel : data.channels.find((n) => n !== data.loss && n !== "lr") || data.channels[0];
    add(byId("plot-channel"), (element) => channel(element, chooser.value));
    chooser.addEventListener("change", redraw);
  }

  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.disabled = !has(input.value);
    input.addEventListener("change", () => { state.axis = input.value; redraw(); });
  }
  const theme = byId("theme");
  theme.addEventListener("click", () => {
    const shown = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = shown === "dark" ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "radio") return;
    const axis = Object.keys(AXES)[Number(event.key) - 1];
    const input = axis && document.querySelector(`input[name=axis][value=${axis}]`);
    if (input && !input.disabled) input.click();
    if (event.key === "t") theme.click();
  });
  addEventListener("beforeprint", () => { for (const element of plots.keys()) if (!element.dataset.drawn) drawNow(element); });
  document.documentElement.dataset.ready = "yes";
})();
