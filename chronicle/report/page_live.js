// Served pages only. Points of the running launch are added to its curves; when the story has grown, the head and the body of the
// page are exchanged. Zoom, chosen channel, open folds and the place that is read stay as they are.
const POINTS = 16_000; // of one curve, beyond which the server thins it again
const label = byId("live");
let mark = data.mark, asking = false, behind = false, drawnAt = 0;

const titleOf = (fold) => `${fold.closest("[id]")?.id}/${fold.querySelector("summary")?.textContent}`;
function exchange(fresh) {
  const open = new Set([...document.querySelectorAll("main details[open]")].map(titleOf));
  const drawn = new Set([...plots.keys()].filter((element) => element.dataset.drawn).map(nameOf));
  const read = [...document.querySelectorAll("main section[id], main article[id]")].findLast((one) => one.getBoundingClientRect().top <= 80);
  const place = read && scrollY > 0 ? { id: read.id, top: read.getBoundingClientRect().top } : null;
  byId("head").innerHTML = fresh.header;
  document.querySelector("main").innerHTML = fresh.body;
  take(fresh.data);
  mark = data.mark;
  build();
  for (const element of plots.keys()) if (drawn.has(nameOf(element))) drawNow(element);
  for (const fold of document.querySelectorAll("main details")) if (open.has(titleOf(fold))) fold.open = true;
  if (place && byId(place.id)) scrollBy(0, byId(place.id).getBoundingClientRect().top - place.top);
}
async function ask() {
  if (asking) { behind = true; return; }
  asking = true;
  try {
    do { behind = false; exchange(await (await fetch("state.json")).json()); } while (behind);
  } finally { asking = false; }
}

function append(launch, rows) {
  const clock = clocks.get(launch);
  if (!launches.has(launch)) return false;
  for (const [step, time, values] of rows) {
    for (const [name, value] of Object.entries(values)) {
      if (!data.channels.includes(name)) { if (data.channels.length < 40) return false; continue; }
      const curve = data.curves[name].find((c) => c.launch === launch);
      if (!curve?.kept || curve.kept.s.length > POINTS || step <= curve.kept.s.at(-1)) return false;
      curve.kept.s.push(step);
      curve.kept.v.push(value);
      const range = data.ranges[name];
      if (range && value !== null) { range[0] = Math.min(range[0], value); range[1] = Math.max(range[1], value); }
    }
    if (clock && time !== null) { clock.time[0].push(step); clock.time[1].push(time); end = Math.max(end, time); }
    const told = { step, loss: values[data.loss], LR: values[data.lr] };
    for (const [fact, value] of Object.entries(told)) {
      const place = byId("head").querySelector(`[data-fact="${fact}"] b`);
      if (place && value !== undefined && value !== null) place.textContent = fact === "step" ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
    }
  }
  const of = launches.get(launch), last = rows.at(-1)[0];
  if (of.keptTo === of.last) of.keptTo = last;
  of.last = last;
  return true;
}
function redrawSeen() { // at most every second second; what is not in view is drawn when it comes into view
  if (Date.now() - drawnAt < 2000) { if (!redrawSeen.later) redrawSeen.later = setTimeout(() => { redrawSeen.later = 0; redrawSeen(); }, 2000); return; }
  drawnAt = Date.now();
  for (const [element, draw] of plots) {
    if (!element.dataset.drawn) continue;
    const { top, bottom } = element.getBoundingClientRect();
    if (bottom > -300 && top < innerHeight + 300) draw();
    else { delete element.dataset.drawn; observer.observe(element); }
  }
}

const source = new EventSource("events"), told = (event) => JSON.parse(event.data);
source.addEventListener("open", () => { label.textContent = "live"; });
source.addEventListener("error", () => { label.textContent = "connection lost, trying again"; });
source.addEventListener("here", (event) => { if (told(event).mark !== mark) ask(); });
source.addEventListener("story", ask);
source.addEventListener("points", (event) => {
  const { launch, points, mark: now } = told(event);
  if (asking || !append(launch, points)) { ask(); return; }
  mark = now;
  redrawSeen();
});
