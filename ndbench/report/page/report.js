"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // ---- the table: filter, sort, open
  const table = document.getElementById("table");
  const bodies = all("tbody.cell", table);
  const words = new Map(bodies.map((body) => [body, body.rows[0].textContent.toLowerCase()]));
  const chips = all(".chip");
  const filter = document.getElementById("filter");

  function applyFilter() {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const on = new Set(chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.verdict));
    let shown = 0;
    for (const body of bodies) {
      body.hidden = !(on.has(body.dataset.verdict) && wanted.every((word) => words.get(body).includes(word)));
      if (!body.hidden) shown += 1;
    }
    document.getElementById("count").textContent = `${shown} of ${bodies.length} cells`;
  }
  filter.addEventListener("input", applyFilter);
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      applyFilter();
    });
  }

  function valueOf(body, column, kind) {
    const cell = body.rows[0].cells[column];
    const value = "v" in cell.dataset ? cell.dataset.v : cell.textContent.trim();
    if (value === "") return null;
    return kind === "n" || column === 1 ? Number(value) : value;
  }
  const collator = new Intl.Collator("en", { numeric: true });
  for (const button of all("[data-sort]", table)) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of all("th[aria-sort]", table)) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const column = Number(button.dataset.sort);
      const keyed = bodies.map((body) => [valueOf(body, column, button.dataset.kind), body]);
      keyed.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null); // nothing to show: always last
        return sign * (typeof a === "number" ? a - b : collator.compare(a, b));
      });
      table.append(...keyed.map(([, body]) => body));
    });
  }

  function open(body, wanted) {
    const button = body.querySelector(".open");
    const detail = body.rows[1];
    detail.hidden = wanted === undefined ? !detail.hidden : !wanted;
    button.setAttribute("aria-expanded", String(!detail.hidden));
    if (!detail.hidden) all(".plot", detail).forEach(draw);
  }
  for (const body of bodies) body.querySelector(".open").addEventListener("click", () => open(body));

  function follow() {
    const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
    if (target === null) return;
    if (target.matches("tbody.cell")) {
      if (target.hidden) {
        filter.value = "";
        chips.forEach((chip) => chip.setAttribute("aria-pressed", "true"));
        applyFilter();
      }
      open(target, true);
      target.scrollIntoView({ block: "start" });
    } else if (target.matches("details")) {
      target.open = true;
    }
  }
  addEventListener("hashchange", follow);

  const more = document.getElementById("all-findings");
  if (more !== null) {
    more.addEventListener("click", () => {
      document.getElementById("more-findings").hidden = false;
      more.setAttribute("aria-expanded", "true");
      more.hidden = true;
    });
  }

  // ---- light and dark
  const toggle = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function themed() {
    toggle.setAttribute("aria-pressed", String(isDark()));
    for (const place of all(".plot.drawn")) window.Plotly.relayout(place, coloursFor(place.layout));
  }
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    themed();
  });
  system.addEventListener("change", themed);

  function colours() {
    const style = getComputedStyle(root);
    const found = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": style.getPropertyValue("--fg").trim() };
    for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
      found[`${axis}.gridcolor`] = style.getPropertyValue("--line").trim();
      found[`${axis}.zerolinecolor`] = style.getPropertyValue("--soft").trim();
    }
    found["hoverlabel.bgcolor"] = style.getPropertyValue("--tint").trim();
    found["hoverlabel.font.color"] = style.getPropertyValue("--fg").trim();
    return found;
  }

  /** Those of the axes that the figure has: naming another would add it. */
  function coloursFor(layout) {
    return Object.fromEntries(Object.entries(colours()).filter(([path]) => !path.startsWith("yaxis2") || "yaxis2" in layout));
  }

  // ---- figures: unpacked once, drawn when they come into view
  async function unpack(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }
  let loading = null;
  function figures() {
    loading ??= (async () => {
      const [library, packed] = await Promise.all([unpack("packed-plotly"), unpack("packed-figures")]);
      const script = document.createElement("script");
      script.textContent = library;
      document.head.append(script);
      return JSON.parse(packed);
    })();
    return loading;
  }
  function nested(flat, layout) {
    for (const [path, value] of Object.entries(flat)) {
      const parts = path.split(".");
      const last = parts.pop();
      parts.reduce((at, part) => (at[part] ??= {}), layout)[last] = value;
    }
    return layout;
  }
  async function draw(place) {
    if (place.dataset.state || typeof DecompressionStream === "undefined") return;
    place.dataset.state = "drawing";
    const figure = (await figures())[place.dataset.figure];
    const layout = nested(coloursFor(figure.layout), figure.layout);
    layout.font.family = getComputedStyle(document.body).fontFamily;
    place.style.minHeight = `${layout.height}px`;
    await window.Plotly.newPlot(place, figure.data, layout, { displaylogo: false, responsive: true, displayModeBar: false, scrollZoom: false });
    place.classList.add("drawn");
  }
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("no-figures").hidden = false;
  } else {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
    }, { rootMargin: "300px" });
    for (const place of all("#layouts .plot")) seen.observe(place);
  }
  toggle.setAttribute("aria-pressed", String(isDark()));
  follow();
})();
