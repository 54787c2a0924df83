// Real text. Each token has the colour of its leading expert, and a tooltip with its gate.

const PASSAGE = 220; // tokens shown together at least, in whole windows
const MANY = 12; // experts in a tooltip; of more, the largest gates are shown

// The strongest colour behind a token, so that its text stays readable. Hues for many experts are less even.
const strongest = (N) => (N <= EXPERTS.length ? 0.5 : 0.35);

// Windows in groups that are long enough to read: [{from, windows, tokens}].
function passagesOf(windows) {
  const out = [];
  let from = 0;
  for (const w of windows) {
    const last = out[out.length - 1];
    if (last && last.tokens < PASSAGE) {
      last.windows.push(w);
      last.tokens += w.pieces.length;
    } else out.push({ from, windows: [w], tokens: w.pieces.length });
    from += w.pieces.length;
  }
  return out;
}

function textView(run, state) {
  const gates = gatesOf(run), N = gateSize(run), passages = passagesOf(run.sample.windows);
  const page = el("div", {
    class: "tokens",
    id: "tokens",
    role: "list",
    "aria-label": "Tokens; arrow keys move between them",
  });
  // A button shows only the tokens of its expert, until it is pressed again.
  const keys = Array.from({ length: N }, (_, e) => {
    const choose = () => {
      only = only === e ? null : e;
      paint();
    };
    const swatch = el("i", { class: "swatch", style: { background: expertColor(e, N) } });
    return el("button", { type: "button", onclick: choose }, swatch, String(e));
  });
  const pick = el(
    "select",
    { id: "passage", onchange: () => show(Number(pick.value)) },
    passages.map((p, i) =>
      el(
        "option",
        { value: i },
        `${i + 1} of ${passages.length} (${[...new Set(p.windows.map((w) => w.domain))].join(", ")})`,
      )
    ),
  );
  const numbers = el("input", {
    type: "checkbox",
    id: "numbers",
    onchange: () => page.classList.toggle("numbered", numbers.checked),
  });
  let only = null, spans = [];

  function show(i) {
    let t = passages[i].from;
    spans = [];
    page.replaceChildren(...passages[i].windows.flatMap((w, n) => {
      const made = w.pieces.map((piece, j) => {
        const span = el(
          "span",
          { class: "tok", role: "listitem", tabindex: -1, "data-t": t++ },
          visible(piece),
        );
        span.about = { piece, type: run.analysis.types[w.types[j]], domain: w.domain };
        return span;
      });
      spans.push(...made);
      return n ? [el("div", { class: "cut", "aria-hidden": "true" }), ...made] : made;
    }));
    if (spans.length) spans[0].tabIndex = 0;
    paint();
  }

  function paint() {
    const { alpha, selection } = settingOf(run, state, state.layer);
    const leads = new Array(N).fill(0);
    for (const span of spans) {
      const found = tokenGate(gates[state.layer], Number(span.dataset.t), alpha, selection),
        e = found.order[0];
      leads[e]++;
      span.style.backgroundColor = expertColor(e, N, 0.1 + (strongest(N) - 0.1) * Math.sqrt(found.p[e]));
      span.dataset.expert = e;
      span.classList.toggle("faded", only !== null && e !== only);
    }
    keys.forEach((button, e) => {
      button.setAttribute("aria-pressed", only === e);
      button.title = `leads ${leads[e]} of ${spans.length} tokens`;
    });
  }

  const explainToken = (span, x, y) => tip.show(span, tokenTip(run, state, gates, span), x, y);
  const tokenAt = (event) => event.target.closest(".tok");
  const follow = (event) => {
    const span = tokenAt(event);
    if (!span) return;
    if (tip.owner === span) tip.move(event.clientX, event.clientY);
    else explainToken(span, event.clientX, event.clientY);
  };
  for (const kind of ["pointerover", "pointermove", "click"]) page.addEventListener(kind, follow);
  page.addEventListener("pointerout", (event) => hasLeft(event) && tip.hide(tokenAt(event)));
  page.addEventListener("focusin", (event) => {
    const span = tokenAt(event);
    if (!span || tip.owner === span) return;
    const box = span.getBoundingClientRect();
    explainToken(span, box.left, box.bottom);
  });
  page.addEventListener("focusout", (event) => tip.hide(tokenAt(event)));
  page.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const here = spans.indexOf(tokenAt(event));
    if (!move || here < 0) return;
    event.preventDefault();
    const next = spans[Math.max(0, Math.min(spans.length - 1, here + move))];
    spans[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus({ preventScroll: false });
  });
  show(0);
  return {
    nodes: [
      el(
        "p",
        {},
        `Text: ${run.analysis.text}. Each token has the colour of its leading expert at the setting above; ` +
          "the stronger the colour, the larger the gate. Point at, tap or focus a token to see its gate.",
      ),
      el(
        "div",
        { class: "row" },
        el("label", { class: "choice" }, el("span", {}, "passage"), pick),
        el("label", {}, numbers, "expert numbers"),
      ),
      el("div", { class: "key", role: "group", "aria-label": "Experts" }, keys),
      page,
    ],
    update: paint,
  };
}

// Makes line ends and tabs visible.
const visible = (piece) => piece.replace(/\r?\n/g, "↵\n").replace(/\t/g, "→\t");

function tokenTip(run, state, gates, span) {
  const N = gateSize(run), { piece, type, domain } = span.about;
  const { alpha, selection } = settingOf(run, state, state.layer);
  const { p, order, kept, computed, entropy, band: [low, high] } = tokenGate(
    gates[state.layer],
    Number(span.dataset.t),
    alpha,
    selection,
  );
  const chosen = new Set(order.slice(0, kept));
  const shown = N <= MANY ? Array.from(p, (_, e) => e) : Array.from(order.slice(0, MANY));
  const bars = shown.map((e) =>
    el(
      "div",
      { class: chosen.has(e) ? "gate kept" : "gate", "data-expert": e },
      el("span", { class: "n" }, String(e)),
      el(
        "span",
        { class: "track" },
        el("i", { style: { width: `${(100 * p[e]).toFixed(2)}%`, background: expertColor(e, N) } }),
      ),
      el("span", { class: "v" }, percent(p[e])),
    )
  );
  const rest = N > MANY
    ? tipRow(`the other ${N - MANY}`, percent(order.slice(MANY).reduce((sum, e) => sum + p[e], 0)))
    : null;
  return [
    el("div", { class: "tip-title token" }, JSON.stringify(piece)),
    tipRow("type", type),
    tipRow("domain", domain),
    tipRow(`block ${run.model.moe_layers[state.layer]}`, run.sample.dial ? `α ${digits(alpha)}` : "no dial"),
    tipRow("entropy", fixed(entropy, 2)),
    bandTells({ lower: low, upper: high }, N) ? tipRow("certified", `${fixed(low, 2)} – ${fixed(high, 2)}`) : null,
    selection.kind === "own" ? null : tipRow(`computed, ${saySelection(selection)}`, `${computed} of ${run.model.experts}`),
    el("div", { class: "gates" }, bars),
    rest,
  ].filter(has);
}
