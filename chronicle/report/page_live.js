// Served pages only: reload when the server says that something changed, keep the place and the choices.
(() => {
  const label = document.getElementById("live"), key = "chronicle-view";
  const kept = JSON.parse(sessionStorage.getItem(key) || "null");
  if (kept) {
    if (kept.theme) document.documentElement.dataset.theme = kept.theme;
    const input = document.querySelector(`input[name=axis][value="${kept.axis}"]`);
    if (input && !input.checked) input.click();
    scrollTo(0, kept.y);
  }
  const source = new EventSource("events");
  source.addEventListener("open", () => { label.textContent = "live"; });
  source.addEventListener("error", () => { label.textContent = "connection lost, trying again"; });
  source.addEventListener("change", () => {
    const axis = document.querySelector("input[name=axis]:checked").value;
    sessionStorage.setItem(key, JSON.stringify({ y: scrollY, axis, theme: document.documentElement.dataset.theme || "" }));
    location.reload();
  });
})();
