// The plots of a study: curves of its arms, and its contrasts.
const SHADES = ["#2f6fb0", "#d9822b", "#3c9a5f", "#72591d", "#1c5fc4", "#5c99d6", "#6aa117", "#1d7225"];
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
  const shapes = panel.marks.map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: grey(), width: 1, dash: "dot" }, layer: "between" }));
  if (channel === "difference" && panel.margin) for (const y of [panel.margin, -panel.margin])
    shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: AMBER, width: 1, dash: "dash" }, layer: "between" });
  react(element, traces, { height: 320, xaxis: { title: { text: escape(panel.x) } }, yaxis: { title: { text: escape(panel.unit) } }, shapes });
}

function contrasts(element, panel) {
  const rows = panel.contrasts.filter((c) => c.mean !== null), ys = rows.map((_, i) => i);
  const side = (name, sign) => rows.map((c) => (c[name] === null ? 0 : sign * (c[name] - c.mean)));
  const brief = (v) => `${v > 0 ? "+" : ""}${Number(v.toPrecision(2))}`, beyond = (c) => panel.reach && Math.max(-c.low, c.high) > panel.reach;
  const said = rows.flatMap((c, i) => (beyond(c) ? [{
    x: 1, xref: "paper", xanchor: "right", y: i + 0.34, showarrow: false, font: { size: 10 },
    text: `${brief(c.mean)} (${brief(c.low)} … ${brief(c.high)}), beyond the axis`,
  }] : []));
  react(element, [{
    type: "scatter", mode: "markers", x: rows.map((c) => c.mean), y: ys, marker: { size: 9, color: css("--accent") },
    error_x: { type: "data", symmetric: false, array: side("high", 1), arrayminus: side("low", -1), color: css("--accent") },
    text: rows.map((c) => `${escape(c.name)}: ${escape(c.verdict)}`), hovertemplate: "%{text}<br>%{x:.4g}<extra></extra>", showlegend: false,
  }], {
    height: 120 + 34 * rows.length, yaxis: { tickvals: ys, ticktext: rows.map((c) => escape(c.name)), range: [rows.length - 0.4, -0.6] },
    xaxis: { title: { text: `difference (${escape(panel.unit)})` }, zeroline: true, zerolinewidth: 2, range: panel.reach ? [-panel.reach, panel.reach] : undefined },
    annotations: said, shapes: panel.margin ? [{ type: "rect", x0: -panel.margin, x1: panel.margin, yref: "paper", y0: 0, y1: 1, fillcolor: AMBER, opacity: 0.12, line: { width: 0 }, layer: "below" }] : [],
  });
}
