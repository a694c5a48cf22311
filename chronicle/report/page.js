// Puts the plots into the page and listens. Text of people is only ever set as text. Plots are drawn when they come into
// view, so that a long history opens at once. Keys: 1-4 choose the x axis, l the log axis, t the theme, / searches the story.
const observer = new IntersectionObserver((seen) => {
  for (const entry of seen) if (entry.isIntersecting) { observer.unobserve(entry.target); if (waiting.push(entry.target) === 1) drawNext(); }
}, { rootMargin: "300px" });
const waiting = []; // in view and not drawn: one plot at a time, so that the first is seen before the others are begun
function drawNext() {
  if (!waiting[0].dataset.drawn && plots.has(waiting[0])) drawNow(waiting[0]);
  setTimeout(() => { waiting.shift(); if (waiting.length) drawNext(); }, 0);
}
function drawNow(element) {
  element.dataset.drawn = "yes";
  plots.get(element)();
}
// Tab goes to what is drawn: the plots that follow the focus are, so that it passes none by.
document.addEventListener("focusin", ({ target }) => {
  const next = [...plots.keys()].filter((one) => !one.dataset.drawn && target.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING);
  for (const one of next.slice(0, 2)) drawNow(one);
});
function add(element, draw) {
  if (!element) return;
  plots.set(element, () => draw(element));
  observer.observe(element);
}
function redraw() {
  for (const [element, draw] of plots) if (element.dataset.drawn) draw();
  for (const fold of document.querySelectorAll("details.numbers[open]")) fillIn(fold);
}
const ROWS = 40; // of one line in the table under its plot
function numbers(element) {
  const fold = document.createElement("details"), title = document.createElement("summary");
  fold.className = "numbers";
  title.textContent = "as a table";
  fold.append(title);
  fold.addEventListener("toggle", () => { if (fold.open) fillIn(fold); });
  element.after(fold);
}
function fillIn(fold) {
  const element = fold.previousElementSibling, rows = [["line", "x", "y"]];
  if (!element.dataset.drawn) drawNow(element);
  for (const t of element.data) {
    if (t.hoverinfo === "skip" && t.fill) continue; // the edge of a band
    const shown = [...t.x.keys()].filter((i) => t.y[i] !== null && t.y[i] !== undefined), stride = Math.ceil(shown.length / ROWS);
    for (const i of shown.filter((_, n) => n % stride === 0 || n === shown.length - 1)) rows.push([t.name || "", t.x[i], t.y[i]]);
  }
  const table = document.createElement("table"), holder = document.createElement("div");
  for (const [n, row] of rows.entries())
    table.insertRow().append(...row.map((value, column) => {
      const cell = document.createElement(n ? "td" : "th");
      cell.textContent = typeof value === "number" ? String(Number(value.toPrecision(6))) : value ?? "";
      if (column) cell.className = "n";
      return cell;
    }));
  holder.className = "wide";
  holder.append(table);
  while (fold.children.length > 1) fold.lastChild.remove();
  fold.append(holder);
}
function box(parent, title, words = "", anchor = "") {
  const holder = document.createElement("div"), heading = document.createElement("h3"), plot = document.createElement("div");
  holder.className = "card";
  if (anchor) {
    const link = document.createElement("a");
    link.href = `#${anchor}`;
    link.textContent = title;
    heading.append(link);
  } else heading.textContent = title;
  plot.className = "plot";
  plot.dataset.title = title;
  plot.dataset.name = `${title} ${anchor}`;
  holder.append(heading);
  if (words) {
    const line = document.createElement("p");
    line.className = "soft";
    line.textContent = words;
    holder.append(line);
  }
  holder.append(plot);
  parent.append(holder);
  numbers(plot);
  return plot;
}
const byId = (id) => document.getElementById(id);

function build() { // of what is in <main> now
  plots.clear();
  observer.disconnect();
  resized.disconnect();
  add(byId("plot-lineage"), lineage);
  if (data.resumes.length) add(byId("plot-resumes"), resumes);
  if (data.clocks.some((c) => c.time[0].length)) add(byId("plot-staircase"), staircase);
  const cards = byId("cards");
  if (cards) for (const c of data.cards) add(box(cards, c.title, [`launch ${c.launch}`, c.words, c.detail].filter(Boolean).join(" · "), c.id), (element) => card(element, c));
  const sources = byId("sources");
  if (sources) for (const name of data.groups.sources) add(box(sources, name), (element) => channel(element, name, { height: 220, bare: true }));
  const health = byId("health");
  if (health) {
    if (data.loss && data.groups.health.length) add(box(health, data.loss), (element) => channel(element, data.loss, { height: 220 }));
    for (const name of data.groups.health) add(box(health, `${name} (log)`), (element) => channel(element, name, { height: 220, log: true }));
  }
  const chooser = byId("channel");
  if (chooser) {
    for (const name of data.channels) {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      chooser.append(option);
    }
    const known = [data.loss, data.lr]; // what a rollback itself changes is no news
    const counts = /(^|[/_.])(epochs?|steps?|iterations?|samples|tokens|time)$/; // only ever rise: no news either
    const news = (name) => !known.includes(name) && !counts.test(name);
    const jumped = data.resumes.flatMap((r) => r.shifts).filter((s) => news(s.channel)).sort((a, b) => Math.abs(b.sigmas) - Math.abs(a.sigmas))[0];
    const usual = jumped ? jumped.channel : data.channels.find(news) || data.channels[0];
    chooser.value = data.channels.includes(state.channel) ? state.channel : usual;
    add(byId("plot-channel"), (element) => channel(element, chooser.value));
    chooser.addEventListener("change", () => { state.channel = chooser.value; state.zoom.delete("plot-channel"); redraw(); });
    numbers(byId("plot-channel"));
    for (const name of state.panels.filter((one) => data.channels.includes(one))) addPanel(name);
    byId("more").addEventListener("click", () => {
      const used = [chooser.value, ...state.panels], fresh = data.channels.find((name) => !used.includes(name)) || data.channels[0];
      state.panels.push(fresh);
      addPanel(fresh).focus();
    });
  }
  const machines = byId("machine");
  if (machines) for (const name of data.groups.machine) add(box(machines, name), (element) => machine(element, name));
  const find = byId("find");
  if (find) {
    find.value = state.find || "";
    find.addEventListener("input", () => { state.find = find.value; sift(); });
    sift();
  }
  for (const input of document.querySelectorAll("input[name=axis]")) input.disabled = !has(input.value);
}
function addPanel(name) { // one more panel, with any channel; its own choice and its own zoom
  const holder = document.createElement("div"), choice = document.createElement("select"), gone = document.createElement("button"), plot = document.createElement("div");
  holder.className = "panel";
  holder.id = `panel-${++addPanel.count}`;
  choice.setAttribute("aria-label", "channel of this panel");
  for (const one of data.channels) choice.append(new Option(one, one));
  choice.value = name;
  gone.type = "button";
  gone.textContent = "remove";
  plot.className = "plot";
  holder.append(choice, " ", gone, plot);
  byId("panels").append(holder);
  add(plot, (element) => channel(element, choice.value));
  numbers(plot);
  choice.addEventListener("change", () => {
    state.panels[state.panels.indexOf(name)] = choice.value;
    name = choice.value;
    state.zoom.delete(nameOf(plot));
    if (plot.dataset.drawn) plots.get(plot)();
  });
  gone.addEventListener("click", () => { state.panels.splice(state.panels.indexOf(name), 1); plots.delete(plot); holder.remove(); });
  return choice;
}
addPanel.count = 0;
function sift() { // the story's chapters that hold every word
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean), story = byId("story");
  const chapters = [...story.querySelectorAll("article")], has = (one) => words.every((word) => one.textContent.toLowerCase().includes(word));
  for (const one of chapters) one.hidden = words.length > 0 && !has(one);
  for (const row of story.querySelectorAll("table.chapters tbody tr")) row.hidden = words.length > 0 && !has(row);
  if (words.length) for (const fold of story.querySelectorAll(":scope > details")) fold.open = fold.querySelector("article:not([hidden])") !== null;
  byId("found").textContent = words.length ? `${chapters.filter((one) => !one.hidden).length} of ${chapters.length} chapters` : "";
}
build();

const log = byId("log"), smooth = byId("smooth"), wide = byId("wide");
log.checked = data.spread.includes(data.loss);
log.addEventListener("change", () => { state.log = log.checked; state.zoom.clear(); redraw(); });
smooth.addEventListener("input", () => {
  state.smooth = Number(smooth.value);
  wide.textContent = state.smooth ? `${state.smooth} %` : "";
  clearTimeout(smooth.later);
  smooth.later = setTimeout(redraw, 60);
});
for (const input of document.querySelectorAll("input[name=axis]"))
  input.addEventListener("change", () => { state.axis = input.value; redraw(); });
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
  if (event.key === "l") log.click();
  if (event.key === "/" && byId("find")) { event.preventDefault(); byId("find").focus(); }
});
function reveal() {
  const meant = byId(location.hash.slice(1));
  for (let fold = meant?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (meant) meant.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();
addEventListener("beforeprint", () => { for (const element of plots.keys()) if (!element.dataset.drawn) drawNow(element); });
document.documentElement.dataset.ready = "yes";
