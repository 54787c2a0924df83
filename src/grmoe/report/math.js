// Gates at any α, their entropy with its certified band, and the experts that a selection keeps. The same as
// grmoe.routing and grmoe.certificates, in doubles; the tests compare the two.
//
// Legend: T tokens, N experts, the last of them identity experts, which compute nothing. ℓ = a + α·b; b is stored as 16-bit steps below each token's largest.

function decodeGates(packed, N, identity) {
  const bytes = atob(packed.scores), count = bytes.length / 2;
  const b = new Float64Array(count);
  // Experts sorted by probability. Kept from one α to the next, because the order seldom changes.
  const order = new Uint16Array(count);
  for (let i = 0; i < count; i++) {
    b[i] = -packed.step * (bytes.charCodeAt(2 * i) + 256 * bytes.charCodeAt(2 * i + 1));
    order[i] = i % N;
  }
  return { T: count / N, N, computing: N - identity, a: Float64Array.from(packed.a), b, order, curve: null };
}

function logitsOf(gates, t, alpha, into) {
  const { N, a, b } = gates;
  for (let e = 0; e < N; e++) into[e] = a[e] + alpha * b[t * N + e];
  return into;
}

function softmax(l, into) {
  let most = -Infinity;
  for (const value of l) most = Math.max(most, value);
  let sum = 0;
  for (let e = 0; e < l.length; e++) sum += into[e] = Math.exp(l[e] - most);
  for (let e = 0; e < l.length; e++) into[e] /= sum;
  return into;
}

function entropyOf(p) {
  let sum = 0;
  for (const value of p) if (value > 0) sum -= value * Math.log(value);
  return sum;
}

// [lower, upper] of the entropy of softmax(l), nats: `entropy_bounds(l, "sharp")`.
function entropyBounds(l) {
  const N = l.length, logN = Math.log(N);
  let high = -Infinity, low = Infinity, sum = 0;
  for (const value of l) {
    high = Math.max(high, value);
    low = Math.min(low, value);
    sum += value;
  }
  const r = high - low;
  if (!Number.isFinite(r)) return [0, logN];
  const mean = sum / N;
  let squares = 0;
  for (const value of l) squares += (value - mean) * (value - mean);
  const unitVariance = r > 0 ? squares / N / (r * r) : 0;
  const p = Math.exp(-r);
  let lowest = Infinity; // over all counts m of experts at the top, the others r below
  for (let m = 1; m < N; m++) {
    const tail = p * (N - m), Z = m + tail;
    lowest = Math.min(lowest, Math.log(Z) + r * tail / Z);
  }
  const lower = Math.max(logN - (high - mean), lowest, 0);
  const highest = Math.log(N - 2 + Math.exp(-r / (1 + p)) + Math.exp(r * p / (1 + p)));
  const integral = -Math.expm1(-r) - r * p;
  return [lower, Math.min(highest, logN - unitVariance * integral, logN)];
}

// Sorts the experts order[from … from+N) by probability, the first of equals first.
function sortExperts(order, from, N, p) {
  for (let i = 1; i < N; i++) {
    const e = order[from + i];
    let j = i;
    for (; j > 0; j--) {
      const f = order[from + j - 1];
      if (p[f] > p[e] || (p[f] === p[e] && f < e)) break;
      order[from + j] = f;
    }
    order[from + j] = e;
  }
}

// What experts are chosen by: the gate, or softmax(ℓ + bias) where a budget has a bias.
function ranksOf(l, p, bias) {
  return bias ? softmax(l.map((value, e) => value + bias[e]), new Float64Array(l.length)) : p;
}

// How many experts a selection keeps for a token. at(i): its i-th largest probability.
function keptOf(selection, N, at) {
  const { kind, tau, k } = selection;
  if (kind === "dense" || kind === "own") return N;
  // By the cap alone: a clear gate may hold all of τ = 1 before the cap.
  if (kind === "topk" || selection.byCap) return Math.min(k, N);
  let kept = 1;
  if (kind === "threshold") {
    while (kept < N && at(kept) >= tau) kept++;
    return kept;
  }
  if (kind === "at_least") {
    while (kept < Math.min(k, N) && at(kept) >= tau) kept++;
    return kept;
  }
  for (let mass = at(0); kept < Math.min(k, N) && mass < tau; kept++) mass += at(kept);
  return kept;
}

// Means over all tokens of a layer at one α.
function gateStats(gates, alpha, selection) {
  const { T, N, computing, order } = gates;
  const l = new Float64Array(N), p = new Float64Array(N);
  const gate = new Float64Array(N),
    sorted = new Float64Array(N),
    received = new Float64Array(N),
    lead = new Float64Array(N);
  let entropy = 0, lower = 0, upper = 0, pairs = 0, kept = 0;
  for (let t = 0; t < T; t++) {
    const from = t * N;
    const ranks = ranksOf(logitsOf(gates, t, alpha, l), softmax(l, p), selection.bias);
    sortExperts(order, from, N, ranks);
    const count = keptOf(selection, N, (i) => ranks[order[from + i]]);
    for (let i = 0; i < N; i++) {
      const e = order[from + i];
      gate[e] += p[e];
      sorted[i] += p[e];
      if (i < count) {
        kept += p[e];
        if (e >= computing) continue;
        received[e]++;
        pairs++;
      }
    }
    lead[order[from]]++;
    entropy += entropyOf(p);
    const band = entropyBounds(l);
    lower += band[0];
    upper += band[1];
  }
  const share = (values) => Array.from(values, (v) => v / T);
  // Load: the share of tokens that an expert receives. A dense gate sends every token to all: there, those it leads.
  const load = share(selection.kind === "dense" ? lead : received).slice(0, computing);
  const fair = load.reduce((sum, v) => sum + v, 0) / computing;
  const cv = Math.sqrt(load.reduce((sum, v) => sum + (v - fair) ** 2, 0) / computing) / fair;
  return {
    alpha,
    load,
    fair,
    cv,
    gate: share(gate),
    sorted: share(sorted),
    lead: share(lead),
    entropy: entropy / T,
    lower: lower / T,
    upper: upper / T,
    experts: pairs / T,
    dropped: 1 - kept / T,
  };
}

// One token at one α.
function tokenGate(gates, t, alpha, selection) {
  const { N, computing } = gates;
  const l = logitsOf(gates, t, alpha, new Float64Array(N));
  const p = softmax(l, new Float64Array(N));
  const ranks = ranksOf(l, p, selection.bias);
  const order = Uint16Array.from(p, (_, e) => e);
  sortExperts(order, 0, N, ranks);
  const kept = keptOf(selection, N, (i) => ranks[order[i]]);
  const computed = order.subarray(0, kept).filter((e) => e < computing).length;
  return { p, order, kept, computed, entropy: entropyOf(p), band: entropyBounds(l) };
}
