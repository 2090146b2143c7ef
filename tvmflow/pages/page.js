"use strict";
(() => {
  // Sorting: each heading gets a button, so that the keyboard reaches it.
  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent;
    return text === "" || text === "–" ? null : text;
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) continue;
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const sorted = rows
          .map((row) => [value(row, column), row])
          .sort(([a], [b]) => (a === null || b === null || ascending ? compare(a, b) : compare(b, a)));
        table.tBodies[0].append(...sorted.map(([, row]) => row));
      });
    });
  }

  // Tooltips: what a mark says of itself, under the pointer and at the focus.
  const tooltip = document.getElementById("tooltip");
  const show = (mark) => {
    tooltip.textContent = mark.getAttribute("aria-label");
    tooltip.hidden = false;
    const at = mark.getBoundingClientRect();
    const own = tooltip.getBoundingClientRect();
    const left = Math.min(Math.max(at.left + at.width / 2 - own.width / 2, 8), innerWidth - own.width - 8);
    const above = at.top - own.height - 8;
    tooltip.style.left = `${left + scrollX}px`;
    tooltip.style.top = `${(above < 4 ? at.bottom + 8 : above) + scrollY}px`;
  };
  const hide = () => { tooltip.hidden = true; };
  for (const mark of document.querySelectorAll(".mark[tabindex], .node")) {
    // the browser's own tooltip would stand over this one
    mark.querySelector("title")?.remove();
    for (const event of ["pointerenter", "focus"]) mark.addEventListener(event, () => show(mark));
    for (const event of ["pointerleave", "blur"]) mark.addEventListener(event, hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // The choice of colours is kept where the browser allows it.
  try {
    const kept = document.getElementById(`theme-${localStorage.getItem("tvmflow-theme")}`);
    if (kept) kept.checked = true;
    for (const input of document.querySelectorAll("[name=theme]")) {
      input.addEventListener("change", () => localStorage.setItem("tvmflow-theme", input.value));
    }
  } catch { /* a page opened from a file may have no storage */ }

  // A link to a part that is folded opens it; everything is printed.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.dataset.folded = "";
    }
  });
  addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-folded]")) {
      details.open = false;
      delete details.dataset.folded;
    }
  });
})();
