/* The sortable, filterable table of heads. */
const columnsOfHeads = [
  ["head", "Head", null],
  ["alpha", "α", (v) => fixed(v, 3)],
  ["density", "Density", percent, 1],
  ["mean_support", "Keys per query", (v) => fixed(v, 1)],
  ["entropy", "Entropy (nats)", fixed],
  ["max_weight", "Largest weight", percent, 1],
  ["confidence_previous", "Previous", percent, 1],
  ["confidence_current", "Same", percent, 1],
  ["confidence_next", "Next", percent, 1],
  ["mean_distance", "Distance (tokens)", (v) => fixed(v, 1)],
  ["subword_merging", "Subword merging", percent, 1],
  ["subword_merging_multi", "– multi", percent, 1],
  ["interrogation", "Question mark", percent, 1],
  ["special_mass", "Special tokens", percent, 1],
  ["first_mass", "First token", percent, 1],
  ["dependency_accuracy", "Syntax", percent, 1],
  ["best_relation", "Best relation", null],
  ["best_relation_accuracy", "– accuracy", percent, 1],
  ["aer_argmax_output", "AER largest", percent, 1],
  ["aer_support_output", "AER nonzero", percent, 1],
  ["sentence_density_std", "Density s.d.", percent],
  ["importance_masking", "Loss without it (nats)", (v) => fixed(v, 4)],
  ["importance_gradient", "Gradient (nats)", (v) => fixed(v, 4)],
  ["role", "Role", null],
  ["role_strength", "Role strength", fixed, 1],
];

const buildHeadTable = (data, choose, roleName) => {
  const several = data.models.length > 1;
  const rows = data.models.flatMap((model, m) => model.heads.map((head) => ({ ...head, m, model: model.name })));
  const registered = Object.entries(data.statistics).map(([name, label]) => [name, label, name === "firing" ? percent : (v) => fixed(v, 3)]);
  const columns = [...columnsOfHeads, ...registered].filter(([key]) => key === "head" || rows.some((row) => row[key] !== null && row[key] !== undefined));
  const table = document.getElementById("headtable");
  const siteOrder = Object.keys(data.sites);
  const nameOf = (row) => `${shortSite[row.site] || row.site} ${row.layer}.${row.head}`;
  const natural = (row) => row.m * 1e9 + siteOrder.indexOf(row.site) * 1e6 + row.layer * 1e3 + row.head;
  const state = { key: "head", descending: false, chosen: null };

  const head = make("tr", {});
  if (several) head.append(make("th", { class: "text" }, "Model"));
  for (const [key, label] of columns) {
    const cell = make("th", { scope: "col", class: key === "role" || key === "best_relation" ? "text" : null }, make("button", { type: "button", "data-key": key }, label));
    cell.firstChild.addEventListener("click", () => {
      state.descending = state.key === key ? !state.descending : key !== "head" && key !== "role" && !key.startsWith("aer");
      state.key = key;
      fill();
    });
    head.append(cell);
  }
  table.tHead.replaceChildren(head);

  const value = (row) => (state.key === "head" ? natural(row) : state.key === "role" ? (row.role ? roleName(row.site, row.role) : null) : row[state.key]);
  const fill = () => {
    const wanted = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = rows.filter((row) => {
      const text = `${row.model} ${nameOf(row)} ${row.site} ${row.role ? roleName(row.site, row.role) : ""} ${row.best_relation || ""}`.toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
    const sign = state.descending ? -1 : 1;
    shown.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const [noX, noY] = [x === null || x === undefined, y === null || y === undefined];
      if (noX || noY) return noX - noY || natural(a) - natural(b); // what was not measured goes last
      return (typeof x === "string" ? x.localeCompare(y) : x - y) * sign || natural(a) - natural(b);
    });
    head.querySelectorAll("th").forEach((cell) => {
      const key = cell.firstChild.dataset && cell.firstChild.dataset.key;
      if (key === state.key) cell.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    table.tBodies[0].replaceChildren(...shown.map((row) => {
      const line = make("tr", { "data-head": `${row.m}/${row.site}/${row.layer}/${row.head}`, onclick: () => choose(row.m, row.site, row.layer, row.head, true) });
      if (several) line.append(make("td", { class: "text" }, row.model));
      for (const [key, , format, top] of columns) {
        if (key === "head") line.append(make("td", { class: "text" }, make("span", { class: "dot", style: `background:${siteVariable[row.site]}` }), nameOf(row)));
        else if (key === "role") line.append(make("td", { class: "text" }, row.role ? roleName(row.site, row.role) : "–"));
        else if (!format) line.append(make("td", { class: "text" }, row[key] ?? "–"));
        else {
          const meter = top && row[key] !== null && row[key] !== undefined;
          const size = meter ? `background-size:${Math.max(0, Math.min(100, (100 * row[key]) / top)).toFixed(1)}% calc(100% - 6px)` : null;
          line.append(make("td", { class: meter ? "meter" : null, style: size }, format(row[key])));
        }
      }
      return line;
    }));
    document.getElementById("count").textContent = shown.length === rows.length ? `${rows.length} heads` : `${shown.length} of ${rows.length} heads`;
    mark(state.chosen);
  };
  const mark = (keys) => {
    state.chosen = keys;
    table.querySelectorAll("tr.chosen").forEach((line) => line.classList.remove("chosen"));
    for (const key of keys || []) table.querySelector(`tr[data-head="${key}"]`)?.classList.add("chosen");
  };
  document.getElementById("filter").addEventListener("input", fill);
  fill();
  return { mark };
};
