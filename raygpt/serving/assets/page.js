// A scratchpad for a base model; models.js comes before it. The text lives in the editor's DOM: plain text is what was
// typed, a .token is what a model wrote, with its log-probability and alternatives.
"use strict";
const $ = (id) => document.getElementById(id);
const editor = $("editor"), second = $("second"), status = $("status"), options = $("options");
const ALTERNATIVES = 10, POLL_MS = 2000;
let running = null; // an AbortController while texts are written
let history = [], future = []; // snapshots for undo and redo
let branches = [], branch = 0, origin = null; // texts from one place; origin: {before, seed} of the last answer

// ---- the server

let key = sessionStorage.getItem("key");

async function call(path, body, signal) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (answer.status === 401 && (await askForKey())) return call(path, body, signal);
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `the server answers ${answer.status}`);
  return answer;
}

function askForKey() {
  const dialog = $("ask");
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      key = dialog.querySelector("input").value;
      if (key) sessionStorage.setItem("key", key);
      done(Boolean(key));
    }, { once: true });
  });
}

/** The events of a completion: choices with text, logprobs and step. */
async function* completion(body, signal) {
  const reader = (await call("v1/completions", { ...body, stream: true }, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw new Error(message.error.message);
      yield* message.choices;
    }
  }
}

// ---- text: snapshots of the editor, and back

const snapshot = (box) => [...box.childNodes].flatMap(segments);
function segments(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data ? [{ text: node.data }] : [];
  if (node.nodeName === "BR") return [{ text: "\n" }];
  if (node.token) return node.textContent ? [node.textContent === node.token.text ? node.token : { text: node.textContent }] : [];
  const inside = [...node.childNodes].flatMap(segments);
  return node.nodeName === "DIV" ? [{ text: "\n" }, ...inside] : inside;
}
const plain = (parts) => parts.map((part) => part.text).join("");

function show(box, parts) {
  box.replaceChildren(...parts.map((part) => (part.top ? tokenNode(part) : document.createTextNode(part.text))));
}

function tokenNode(token) {
  const node = document.createElement("span");
  node.className = "token";
  node.textContent = token.text;
  node.token = token;
  const share = Math.exp(token.logprob);
  node.style.setProperty("--doubt", Math.min(1, -token.logprob / 7).toFixed(3)); // 7: one in a thousand
  node.title = `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  return node;
}

/** A choice's tokens with the text that each is seen as: tokens of half a character are joined. */
function tokensOf(choice, place) {
  const { tokens, token_logprobs: logprobs, top_logprobs: tops, text_offset: offsets } = choice.logprobs;
  const characters = [...choice.text], found = [];
  tokens.forEach((name, n) => {
    const end = n + 1 < tokens.length ? offsets[n + 1] - place : characters.length;
    const text = characters.slice(offsets[n] - place, end).join("");
    if (text) found.push({ text, logprob: logprobs[n], top: Object.entries(tops[n]).sort((a, b) => b[1] - a[1]) });
  });
  return found;
}

// ---- the cursor

/** What lies before the cursor, as segments; all of it if the cursor is elsewhere. */
function beforeCursor() {
  const selection = getSelection();
  if (!selection.rangeCount || !editor.contains(selection.anchorNode)) return snapshot(editor);
  const range = document.createRange();
  range.setStart(editor, 0);
  range.setEnd(selection.getRangeAt(0).endContainer, selection.getRangeAt(0).endOffset);
  const end = range.cloneContents(), tokens = [...editor.querySelectorAll(".token")];
  end.querySelectorAll(".token").forEach((copy, n) => { copy.token = tokens[n].token; });
  return snapshot(end);
}

function cursorToEnd() {
  const range = document.createRange();
  range.selectNodeContents(editor);
  range.collapse(false);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

// ---- writing

const value = (name) => Number(options.elements[name].value);
const asked = (model, prompt, seed) => ({
  model, ...(prompt.length && { prompt }), seed, logprobs: ALTERNATIVES, max_tokens: value("max_tokens"),
  temperature: value("temperature"), top_p: value("top_p"), top_k: value("top_k"),
});

/** Write on from a place, in both panes if two are open. */
async function write(before, seed = value("seed")) {
  stop();
  closeTops();
  remember();
  origin = { before, seed };
  const own = (running = new AbortController());
  busy(true);
  const boxes = [[editor, $("model").value], ...($("compare").ariaPressed === "true" ? [[second, $("other").value]] : [])];
  const began = performance.now();
  try {
    const counts = await Promise.all(boxes.map(([box, model]) => stream(box, before, model, seed, own.signal)));
    const tokens = counts.reduce((sum, count) => sum + count.tokens, 0), seconds = (performance.now() - began) / 1000;
    say(`${tokens} tokens, ${(tokens / seconds).toFixed(0)}/s · step ${counts[0].step} · seed ${seed}`);
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else say(error.message, true);
  }
  if (running !== own) return;
  running = null;
  busy(false);
  branches[branch] = snapshot(editor);
  cursorToEnd();
  buttons();
}

/** The text, or its last tokens where all of them and the answer are more than the model sees. */
async function seen(model, text, signal) {
  const most = modelNamed(model).max_model_len - value("max_tokens");
  if (new TextEncoder().encode(text).length <= most) return text; // a token has a byte at least
  const { tokens } = await (await call("tokenize", { model, prompt: text }, signal)).json();
  return tokens.length <= most ? text : tokens.slice(-most);
}

async function stream(box, before, model, seed, signal) {
  show(box, before);
  const body = asked(model, await seen(model, plain(before), signal), seed);
  let place = 0, tokens = 0, step = 0;
  for await (const choice of completion(body, signal)) {
    const found = tokensOf(choice, place);
    box.append(...found.map(tokenNode));
    box.scrollTop = box.scrollHeight;
    place += [...choice.text].length;
    tokens += choice.logprobs.tokens.length;
    step = choice.step;
  }
  return { tokens, step };
}

function go() {
  if (origin) options.elements.seed.value = value("seed") + (sameText(beforeCursor(), origin.before) ? 1 : 0);
  branches = [];
  branch = 0;
  return write(beforeCursor());
}
const sameText = (one, other) => plain(one) === plain(other);

function again() {
  if (!origin) return;
  if (!branches.length) branches = [snapshot(editor)];
  branch = branches.length;
  const seed = value("seed") + 1;
  options.elements.seed.value = seed;
  return write(origin.before, seed);
}

function stop() {
  running?.abort();
  running = null;
  busy(false);
}

function turnTo(number) {
  branches[branch] = snapshot(editor);
  remember();
  branch = number;
  show(editor, branches[branch]);
  cursorToEnd();
  buttons();
}

function busy(is) {
  document.body.classList.toggle("busy", is);
  for (const pane of document.querySelectorAll(".pane")) pane.classList.toggle("writing", is);
  $("stop").disabled = !is;
  editor.contentEditable = String(!is);
}

function say(text, isBad = false) {
  status.textContent = text;
  status.classList.toggle("bad", isBad);
}

// ---- undo

function remember() {
  history.push(snapshot(editor));
  history = history.slice(-200);
  future = [];
  buttons();
}

function travel(from, to) {
  if (!from.length || running) return;
  to.push(snapshot(editor));
  show(editor, from.pop());
  cursorToEnd();
  buttons();
}

function buttons() {
  $("undo").disabled = !history.length;
  $("redo").disabled = !future.length;
  $("again").disabled = !origin;
  $("branches").hidden = branches.length < 2;
  $("which").textContent = `${branch + 1}/${branches.length}`;
  $("before").disabled = branch === 0;
  $("after").disabled = branch >= branches.length - 1;
}

// ---- alternatives

const tops = $("tops");
let opened = null;

function openTops(node, focus = false) {
  closeTops();
  opened = node;
  node.classList.add("open");
  tops.replaceChildren(...node.token.top.map(([text, logprob]) => {
    const button = document.createElement("button"), name = document.createElement("code"), share = document.createElement("span");
    const p = Math.exp(logprob);
    button.type = "button";
    button.role = "option";
    button.style.setProperty("--share", p.toFixed(3));
    button.classList.toggle("taken", text === node.token.text);
    name.textContent = text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
    share.textContent = `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;
    button.append(name, share);
    button.onclick = () => take(node, text, logprob);
    return button;
  }));
  tops.hidden = false;
  const place = node.getBoundingClientRect();
  tops.style.left = `${Math.max(8, Math.min(place.left + scrollX, scrollX + document.documentElement.clientWidth - tops.offsetWidth - 8))}px`;
  const below = place.bottom + scrollY + 4, fits = place.bottom + tops.offsetHeight + 8 < innerHeight;
  tops.style.top = `${fits || place.top < tops.offsetHeight ? below : place.top + scrollY - tops.offsetHeight - 4}px`;
  if (focus) tops.querySelector("button").focus();
}

function closeTops() {
  opened?.classList.remove("open");
  opened = null;
  tops.hidden = true;
}

/** Put another token in a token's place, and go on from there. */
function take(node, text, logprob) {
  const box = node.parentNode, before = [];
  for (const child of box.childNodes) {
    if (child === node) break;
    before.push(...segments(child));
  }
  if (!/^token_id:/.test(text) && text !== "<|endoftext|>") before.push({ ...node.token, text, logprob });
  branches = [];
  branch = 0;
  write(before);
}

for (const box of [editor, second]) {
  let timer;
  box.addEventListener("pointerover", (event) => {
    clearTimeout(timer);
    if (event.pointerType === "mouse" && event.target.token && !running) timer = setTimeout(() => openTops(event.target), 350);
  });
  box.addEventListener("pointerout", () => clearTimeout(timer));
  box.addEventListener("click", (event) => { if (event.target.token && !running) openTops(event.target); });
}
document.addEventListener("pointerdown", (event) => {
  if (!tops.contains(event.target) && !event.target.token) closeTops();
});
tops.addEventListener("pointerleave", closeTops);
tops.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const all = [...tops.children];
  all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
  event.preventDefault();
});

function tokenAtCursor() {
  const { anchorNode: node, anchorOffset: offset } = getSelection();
  if (!node || !editor.contains(node)) return null;
  const near = node === editor ? editor.childNodes[Math.max(0, offset - 1)] : node.parentNode.token ? node.parentNode : node.previousSibling;
  return near?.token ? near : null;
}

// ---- two models, and the link

function compare(isOn) {
  $("compare").ariaPressed = String(isOn);
  $("panes").classList.toggle("two", isOn);
  document.querySelector("[data-pane='1']").hidden = !isOn;
  if (isOn && models.length > 1 && $("other").value === $("model").value)
    $("other").value = models.find((model) => model.id !== $("model").value).id;
  badges();
}

function linked() {
  const numbers = Object.fromEntries([...new FormData(options)].map(([name, text]) => [name, Number(text)]));
  const shown = origin ?? { before: snapshot(editor), seed: value("seed") };
  const state = { prompt: plain(shown.before), model: $("model").value, ...numbers, seed: shown.seed, written: Boolean(origin) };
  if ($("compare").ariaPressed === "true") state.other = $("other").value;
  return `${location.href.split("#")[0]}#${encodeURIComponent(JSON.stringify(state))}`;
}

async function copyLink() {
  const link = linked();
  window.history.replaceState(null, "", link);
  try {
    await navigator.clipboard.writeText(link);
    say("link copied");
  } catch {
    say("the link is in the address bar");
  }
}

/** Show what a link shows: it has the prompt, the options and the seed, so the same text is written again. */
async function openLink() {
  if (location.hash.length < 2) return;
  let state;
  try {
    state = JSON.parse(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return say("this link cannot be read", true);
  }
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"])
    if (Number.isFinite(state[name])) options.elements[name].value = state[name];
  outputs();
  for (const [name, id] of [["model", "model"], ["other", "other"]])
    if (models.some((model) => model.id === state[name])) $(id).value = state[name];
  compare(Boolean(state.other));
  const before = state.prompt ? [{ text: String(state.prompt) }] : [];
  show(editor, before);
  if (state.written) await write(before, value("seed"));
}

// ---- controls

function outputs() {
  for (const input of options.querySelectorAll("input[type=range]"))
    input.parentNode.querySelector("output").textContent = input.name === "top_k" && input.value === "0" ? "all" : input.value;
}
options.addEventListener("input", outputs);
options.addEventListener("submit", (event) => event.preventDefault());
$("go").onclick = go;
$("stop").onclick = stop;
$("again").onclick = again;
$("undo").onclick = () => travel(history, future);
$("redo").onclick = () => travel(future, history);
$("before").onclick = () => turnTo(branch - 1);
$("after").onclick = () => turnTo(branch + 1);
$("link").onclick = copyLink;
$("compare").onclick = () => compare($("compare").ariaPressed !== "true");
$("model").onchange = $("other").onchange = badges;
// buttons take no focus from the editor, whose cursor says where to go on
for (const button of document.querySelectorAll(".bar button")) button.addEventListener("pointerdown", (event) => event.preventDefault());

let typedAt = 0;
editor.addEventListener("beforeinput", () => {
  if (Date.now() - typedAt > 1000) remember(); // a second without typing ends what one undo takes back
  typedAt = Date.now();
});
editor.addEventListener("paste", (event) => {
  event.preventDefault();
  document.execCommand("insertText", false, event.clipboardData.getData("text/plain"));
});
editor.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    document.execCommand("insertText", false, "\n");
  }
});
document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey, name = event.key.toLowerCase();
  if (event.key === "Escape") {
    if (tops.hidden) stop();
    else { closeTops(); editor.focus(); }
  } else if (command && event.key === "Enter") event.shiftKey ? again() : go();
  else if (command && name === "z") event.shiftKey ? travel(future, history) : travel(history, future);
  else if (command && name === "y") travel(future, history);
  else if (command && event.key === ".") { const token = tokenAtCursor(); if (token) openTops(token, true); }
  else return;
  if (event.key !== "Escape") event.preventDefault();
});

const theme = $("theme"), root = document.documentElement;
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); };
nameTheme();

async function start() {
  outputs();
  await loadModels();
  const model = modelNamed($("model").value);
  options.elements.max_tokens.value = Math.min(64, Math.max(1, Math.floor(model.max_model_len / 2)));
  outputs();
  buttons();
  editor.focus();
  await follow();
  await openLink();
  setInterval(follow, POLL_MS);
}
start().catch((error) => say(error.message, true));
