// Charts as SVG, written for this page: lines, marks and bands over linear or log axes, several panels over one x axis. A drag zooms, a
// double click or 0 goes back, arrows and + - move with the keyboard, the nearest point is told, a name in the legend hides its line.
// `element.data` and `element.layout` are what is drawn; a trace is {x, y, mode, line, marker, name, hovertemplate, …}.
const DASHES = { dash: "7 4", dot: "1.5 3.5" }, NEAR = 28, MOST_NAMES = 24;
const node = (name, attributes, parent) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== null) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
};
const plainText = (text) => String(text).replace(/&(amp|lt|gt|quot);/g, (_, name) => ({ amp: "&", lt: "<", gt: ">", quot: '"' })[name]);
const number = (v) => typeof v === "number" && Number.isFinite(v);
function short(v) { // a tick: 30,500, 0.0004, 3e-5
  const size = Math.abs(v);
  if (size && (size < 1e-3 || size >= 1e7)) return v.toExponential().replace("e+", "e");
  return Math.abs(v) >= 1e4 ? v.toLocaleString("en", { maximumFractionDigits: 2 }) : String(Number(v.toPrecision(8)));
}
function written(v, digits = 5) {
  return number(v) ? (Number.isInteger(v) && Math.abs(v) < 1e7 ? v.toLocaleString("en") : String(Number(v.toPrecision(digits)))) : String(v ?? "");
}
function ticks([from, to], length, each, log) {
  const low = Math.min(from, to), high = Math.max(from, to), most = Math.max(2, Math.floor(length / each));
  if (log && high >= 8 * low) {
    const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), stride = Math.ceil((last - first) / most);
    for (let power = first; power <= last; power += stride)
      for (const of of last - first <= 2 ? [1, 2, 5] : [1]) found.push(Number(`${of}e${power}`));
    return found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }
  const rough = (high - low) / most || 1, base = 10 ** Math.floor(Math.log10(rough)), step = base * [1, 2, 5, 10].find((m) => m * base >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function extent(values, log) {
  let low = Infinity, high = -Infinity;
  for (const list of values) for (const v of list) if (number(v) && !(log && v <= 0)) { if (v < low) low = v; if (v > high) high = v; }
  return low <= high ? [low, high] : log ? [0.1, 1] : [0, 1];
}
function room([low, high], share, log) { // a little air around what is drawn
  if (log) return [low / 1.15, high * 1.15];
  const pad = (high - low) * share || Math.abs(high) * 0.05 || 0.5;
  return [low - pad, high + pad];
}
const scale = (axis, v) => { // value -> pixel
  const at = axis.type === "log" ? (v > 0 ? Math.log10(v) : NaN) : v, [from, to] = axis.type === "log" ? axis.range.map(Math.log10) : axis.range;
  return axis.start + ((at - from) / (to - from)) * (axis.stop - axis.start);
};
const back = (axis, pixel) => {
  const [from, to] = axis.type === "log" ? axis.range.map(Math.log10) : axis.range, at = from + ((pixel - axis.start) / (axis.stop - axis.start)) * (to - from);
  return axis.type === "log" ? 10 ** at : at;
};
const SYMBOLS = {
  circle: (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  "triangle-down": (x, y, r) => `M${x - r} ${y - r}h${2 * r}L${x} ${y + r}Z`,
  diamond: (x, y, r) => `M${x} ${y - r}L${x + r} ${y}L${x} ${y + r}L${x - r} ${y}Z`,
  x: (x, y, r) => `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`,
};
const SIGNS = { "triangle-down": "▼▽", diamond: "◆◇", x: "✕✕" }; // of a mark in the legend, filled and open
let made = 0;
const resized = new ResizeObserver((seen) => { // a plot is as wide as its place; its zoom stays
  for (const { target } of seen) if (target.layout && Math.abs(target.clientWidth - target.drawnWidth) > 4) chart(target, target.data, target.layout);
});

function chart(element, traces, layout) {
  const hidden = element.hiddenNames ||= new Set(), names = Object.keys(layout).filter((key) => /^yaxis\d*$/.test(key));
  for (const t of traces) t.visible = t.name && hidden.has(t.legendgroup || t.name) ? "legendonly" : true;
  const seen = traces.filter((t) => t.visible === true), width = Math.max(240, element.clientWidth || 600), height = layout.height;
  const of = (t) => (t.yaxis ? `yaxis${t.yaxis.slice(1)}` : "yaxis");
  const x = layout.xaxis;
  x.range ||= room(extent(seen.map((t) => t.x), x.type === "log"), seen.some((t) => /markers/.test(t.mode)) ? 0.02 : 0.005, x.type === "log");
  for (const name of names) layout[name].range ||= room(extent(seen.filter((t) => of(t) === name).map((t) => t.y), layout[name].type === "log"), 0.06, layout[name].type === "log");
  if (element.drawnWidth === undefined) resized.observe(element);
  element.drawnWidth = width;
  element.data = traces;
  element.layout = layout;

  const top = layout.margin?.t ?? 10, bottom = height - (x.title?.text ? 44 : 26), inner = bottom - top;
  const label = (axis) => axis.tickvals ? axis.ticktext : ticks(axis.range, inner * ((axis.domain || [0, 1])[1] - (axis.domain || [0, 1])[0]), 38, axis.type === "log").map(short);
  const shown = names.filter((name) => layout[name].visible !== false);
  const left = 12 + (shown.some((n) => layout[n].title?.text) ? 20 : 0) + 6.6 * Math.min(26, Math.max(1, ...shown.flatMap((n) => label(layout[n]).map((t) => String(t).length))));
  const right = width - 14;
  Object.assign(x, { start: left, stop: right });
  for (const name of names) {
    const [from, to] = layout[name].domain || [0, 1];
    Object.assign(layout[name], { start: bottom - from * inner, stop: bottom - to * inner });
  }
  const svg = node("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": element.getAttribute("aria-label") || element.dataset.title || element.previousElementSibling?.textContent || "plot" });
  const clip = `c${++made}`, defs = node("defs", {}, svg);
  const text = (words, at) => { node("text", at, svg).textContent = plainText(words); };
  for (const name of names) {
    const axis = layout[name], low = Math.max(axis.start, axis.stop), high = Math.min(axis.start, axis.stop);
    node("rect", { x: left, y: high - 1, width: Math.max(0, right - left), height: low - high + 2 }, node("clipPath", { id: `${clip}${name}` }, defs));
    if (axis.visible === false) continue;
    const at = axis.tickvals || ticks(axis.range, low - high, 38, axis.type === "log"), least = axis.tickvals ? 13 : 0;
    let last = -Infinity;
    at.forEach((v, i) => {
      const y = scale(axis, v);
      if (!(y >= high - 1 && y <= low + 1) || Math.abs(y - last) < least) return;
      last = y;
      node("line", { x1: left, x2: right, y1: y, y2: y, class: axis.zeroline && v === 0 ? "zero" : "grid" }, svg);
      text(axis.tickvals ? String(axis.ticktext[i]).slice(0, 26) : short(v), { x: left - 8, y: y + 4, "text-anchor": "end" });
    });
    if (axis.title?.text) text(axis.title.text, { x: 12, y: (low + high) / 2, transform: `rotate(-90 12 ${(low + high) / 2})`, "text-anchor": "middle", class: "title" });
  }
  for (const v of ticks(x.range, right - left, 96, x.type === "log")) {
    const at = scale(x, v);
    if (at < left - 1 || at > right + 1) continue;
    for (const name of shown) node("line", { x1: at, x2: at, y1: layout[name].start, y2: layout[name].stop, class: x.zeroline && v === 0 ? "zero" : "grid" }, svg);
    text(short(v), { x: at, y: bottom + 17, "text-anchor": at > right - 20 ? "end" : "middle" });
  }
  if (x.title?.text) text(x.title.text, { x: (left + right) / 2, y: height - 6, "text-anchor": "middle", class: "title" });

  const all = node("rect", { x: left, y: top, width: Math.max(0, right - left), height: inner }, node("clipPath", { id: clip }, defs));
  const first = layout[shown[0]] || layout[names[0]];
  const draw = (s) => {
    const spot = (v, reference, axis, paper) => (reference === "paper" ? paper(v) : scale(axis, v));
    const x0 = spot(s.x0, s.xref, x, (v) => left + v * (right - left)), x1 = spot(s.x1, s.xref, x, (v) => left + v * (right - left));
    const y0 = spot(s.y0, s.yref, first, (v) => bottom - v * inner), y1 = spot(s.y1, s.yref, first, (v) => bottom - v * inner);
    if (![x0, x1, y0, y1].every(Number.isFinite)) return;
    const look = { stroke: s.line?.color, "stroke-width": s.line?.width, "stroke-dasharray": DASHES[s.line?.dash], opacity: s.opacity, "clip-path": `url(#${clip})` };
    if (s.type === "line") node("line", { x1: x0, x2: x1, y1: y0, y2: y1, ...look }, svg);
    else node("rect", { x: Math.min(x0, x1), y: Math.min(y0, y1), width: Math.abs(x1 - x0), height: Math.abs(y1 - y0), fill: s.fillcolor, opacity: s.opacity, "clip-path": `url(#${clip})` }, svg);
  };
  for (const s of layout.shapes || []) if (s.layer === "below" || s.layer === "between") draw(s);
  const points = []; // [pixel x, pixel y, trace, row]
  for (const t of seen) {
    const axis = layout[of(t)], look = t.line || {}, clipping = { "clip-path": `url(#${clip}${of(t)})` };
    let line = "", marks = "", pen = false;
    const lines = /lines/.test(t.mode), symbol = SYMBOLS[t.marker?.symbol] || SYMBOLS.circle, r = (t.marker?.size || 6) / 2;
    for (let i = 0; i < t.x.length; i++) {
      const px = number(t.x[i]) ? scale(x, t.x[i]) : NaN, py = number(t.y[i]) ? scale(axis, t.y[i]) : NaN;
      if (!Number.isFinite(px) || !Number.isFinite(py)) { pen = false; continue; }
      if (lines) line += `${pen ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
      if (/markers/.test(t.mode) && px >= left - 1 && px <= right + 1) marks += symbol(Number(px.toFixed(1)), Number(py.toFixed(1)), r);
      pen = true;
      if (t.hoverinfo !== "skip") points.push([px, py, t, i]);
    }
    if (t.error_x) t.x.forEach((v, i) => {
      const y = scale(axis, t.y[i]);
      line += `M${scale(x, v - t.error_x.arrayminus[i])} ${y}H${scale(x, v + t.error_x.array[i])}`;
    });
    const stroke = look.color || t.error_x?.color || t.marker?.color;
    if (line) node("path", t.fill ? { d: `${line}Z`, fill: t.fillcolor, ...clipping } : {
      d: line, fill: "none", stroke, "stroke-width": look.width ?? 1.6, "stroke-dasharray": DASHES[look.dash], opacity: t.opacity, "stroke-linejoin": "round", ...clipping,
    }, svg);
    const outlined = t.marker?.symbol === "x", open = t.marker?.open;
    if (marks) node("path", { d: marks, fill: outlined ? "none" : open ? css("--paper") : t.marker?.color || look.color, stroke: outlined || open ? t.marker?.color || look.color : null, "stroke-width": outlined ? 2 : 1.4, opacity: t.opacity, ...(t.cliponaxis === false ? {} : clipping) }, svg);
  }
  for (const s of layout.shapes || []) if (s.layer !== "below" && s.layer !== "between") draw(s);
  for (const a of layout.annotations || []) text(a.text, { x: a.xref === "paper" ? left + a.x * (right - left) : scale(x, a.x), y: scale(first, a.y) + 3, "text-anchor": a.xanchor === "right" ? "end" : "start", class: "small" });

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  const keep = element.querySelector("svg.chart")?.contains(document.activeElement);
  const pressed = [...element.querySelectorAll(".legend button")].indexOf(document.activeElement);
  element.replaceChildren(svg, tip, ...legend(element, traces, hidden));
  if (keep) svg.focus({ preventScroll: true });
  if (pressed >= 0) element.querySelectorAll(".legend button")[pressed]?.focus({ preventScroll: true });
  const again = () => chart(element, traces, layout);
  const zoom = (ranges) => { // {axis name: range}; an empty object goes back to all
    const known = zooms(element);
    for (const [name, range] of Object.entries(ranges)) { layout[name].range = range; known.ranges[name] = range; }
    if (Object.keys(ranges).length) state.zoom.set(nameOf(element), known);
    else state.zoom.delete(nameOf(element));
    if (Object.keys(ranges).length) again(); else plots.get(element)?.();
  };
  listen(element, svg, tip, { x, layout, shown, points, all, zoom, left, right, top, bottom });
}

const zooms = (element) => {
  const known = state.zoom.get(nameOf(element));
  return known?.axis === state.axis ? known : { axis: state.axis, ranges: {} };
};

function legend(element, traces, hidden) {
  const groups = new Map();
  for (const t of traces) if (t.showlegend !== false && t.name && !groups.has(t.legendgroup || t.name)) groups.set(t.legendgroup || t.name, t);
  if (groups.size < 2) return [];
  const list = document.createElement("div");
  list.className = "legend";
  for (const [group, t] of [...groups].slice(0, MOST_NAMES)) {
    const button = document.createElement("button"), swatch = document.createElement("i");
    button.type = "button";
    button.setAttribute("aria-pressed", String(!hidden.has(group)));
    const sign = t.mode === "markers" && SIGNS[t.marker?.symbol];
    if (sign) {
      swatch.className = "sign";
      swatch.textContent = sign[t.marker.open ? 1 : 0];
      swatch.style.color = t.marker.color;
    } else if (t.marker?.open) swatch.className = "ring";
    else swatch.style.background = t.line?.color || t.marker?.color || "currentColor";
    button.append(swatch, plainText(t.name));
    button.addEventListener("click", () => {
      if (hidden.has(group)) hidden.delete(group); else hidden.add(group);
      chart(element, element.data, element.layout);
    });
    list.append(button);
  }
  if (groups.size > MOST_NAMES) list.append(`and ${groups.size - MOST_NAMES} more`);
  return [list];
}

function listen(element, svg, tip, { x, layout, shown, points, zoom, left, right, top, bottom }) {
  const panel = (y) => shown.find((name) => y <= Math.max(layout[name].start, layout[name].stop) && y >= Math.min(layout[name].start, layout[name].stop));
  const at = (event) => { const place = svg.getBoundingClientRect(); return [event.clientX - place.left, event.clientY - place.top]; };
  let from = null, frame = null, dot = null;
  svg.addEventListener("pointerdown", (event) => {
    const [px, py] = at(event);
    if (event.button || px < left || px > right || !panel(py)) return;
    from = [px, py, panel(py)];
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const [px, py] = at(event);
    if (from) {
      const [x0, y0] = from, wide = Math.abs(px - x0) > 6, high = Math.abs(py - y0) > 14 && event.pointerType === "mouse";
      frame ||= node("rect", { class: "frame" }, svg);
      const box = { x: wide ? Math.min(px, x0) : left, width: wide ? Math.abs(px - x0) : right - left, y: high ? Math.min(py, y0) : top, height: high ? Math.abs(py - y0) : bottom - top };
      for (const [key, value] of Object.entries(box)) frame.setAttribute(key, value);
      return;
    }
    let best = null, least = NEAR * NEAR;
    for (const point of points) {
      const dx = point[0] - px, dy = point[1] - py, far = dx * dx + dy * dy;
      if (far < least && point[0] >= left - 2 && point[0] <= right + 2) { least = far; best = point; }
    }
    dot?.remove();
    dot = null;
    tip.hidden = !best;
    if (!best) return;
    const [bx, by, t, i] = best;
    dot = node("circle", { cx: bx, cy: by, r: 3.5, class: "dot" }, svg);
    const words = t.hovertemplate
      ? t.hovertemplate.replace(/<extra><\/extra>/, "").replace(/%\{(\w+)(?::\.(\d)g)?\}/g, (_, name, digits) => ({ x: written(t.x[i], digits), y: written(t.y[i], digits), customdata: written(t.customdata?.[i]), text: t.text?.[i] ?? "" })[name])
      : t.hoverinfo === "text" ? (Array.isArray(t.text) ? t.text[i] : t.text) : `${t.name || ""}<br>${written(t.x[i])}: ${written(t.y[i])}`;
    tip.replaceChildren(...String(words).split("<br>").map((line) => { const row = document.createElement("div"); row.textContent = plainText(line); return row; }));
    tip.style.left = `${Math.min(Math.max(0, bx + 12), Math.max(0, element.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, by - tip.offsetHeight - 10)}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; dot?.remove(); });
  svg.addEventListener("pointercancel", () => { from = null; frame?.remove(); frame = null; });
  svg.addEventListener("pointerup", (event) => {
    if (!from) return;
    const [x0, y0, name] = from, [px, py] = at(event), ranges = {};
    from = null;
    frame?.remove();
    frame = null;
    if (Math.abs(px - x0) > 6) ranges.xaxis = [back(x, Math.min(px, x0)), back(x, Math.max(px, x0))];
    if (Math.abs(py - y0) > 14 && event.pointerType === "mouse") ranges[name] = [back(layout[name], Math.max(py, y0)), back(layout[name], Math.min(py, y0))];
    if (Object.keys(ranges).length) zoom(ranges);
  });
  svg.addEventListener("dblclick", () => zoom({}));
  svg.addEventListener("keydown", (event) => {
    const share = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.3, 0.3] }[event.key];
    if (event.key === "0" || event.key === "Escape") zoom({});
    if (!share || event.ctrlKey || event.metaKey || x.type === "log") return;
    const span = x.range[1] - x.range[0];
    event.preventDefault();
    zoom({ xaxis: [x.range[0] + share[0] * span, x.range[1] + share[1] * span] });
  });
}
