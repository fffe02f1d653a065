// Sort a table by the column whose title is pressed: numbers by size, other words in their order, what is missing last.
for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.ariaSort = sign > 0 ? "ascending" : "descending";
    const rows = [...body.rows].map((row) => {
      const text = row.cells[head.cellIndex].textContent.trim();
      return { row, text, missing: text === "-", number: Number(text.split(" ")[0].replaceAll(",", "").replace("%", "")) };
    });
    rows.sort((a, b) => a.missing - b.missing || sign * (
      Number.isNaN(a.number) || Number.isNaN(b.number)
        ? Number.isNaN(a.number) - Number.isNaN(b.number) || a.text.localeCompare(b.text, "en", { numeric: true })
        : a.number - b.number));
    body.append(...rows.map((one) => one.row));
  });
}
// A link to a run opens its section.
addEventListener("hashchange", () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", ""));
