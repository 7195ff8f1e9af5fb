// What the page knows: the program's JSON, and who makes, reads, holds and sends what.

const data = JSON.parse(document.getElementById('data').textContent);
const report = data.report;
const inputs = byName(report.inputs),
  calls = byName(report.calls),
  layouts = byName(report.layouts),
  chains = byName(report.why),
  because = byName(report.because);
const axes = data.mesh;
const ranks = Object.values(axes).reduce((product, size) => product * size, 1);

const values = new Map(); // by name
data.nodes.forEach((node, place) =>
  values.set(node.name, { ...node, place, users: [], sends: [], given: inputs.get(node.name) }),
);
for (const value of values.values()) value.operands.forEach(name => values.get(name).users.push(value.name));

const stored = new Map(); // parameters and buffers by their names
for (const [kind, entries] of [
  ['parameter', data.parameters],
  ['buffer', data.buffers],
]) {
  for (const entry of entries) stored.set(entry.name, { ...entry, kind });
}
for (const [node, given] of inputs) {
  const entry = stored.get(given.name);
  if (entry && entry.kind === given.kind) Object.assign(entry, given, { node });
}

const places = data.stages.map(stage => stage.rank); // of a pipeline's stages
const collectives = new Map(); // by id
for (const each of data.collectives) {
  const times = each.times || 1;
  const place = [each.id, each.id.replace(/_stage_\d+$/, ''), each.node.split(', ')[0]].find(name => values.has(name));
  const found = {
    ...each,
    total: each.wire_bytes * times,
    count: times,
    at: values.get(place),
    rank: places[each.stage] ?? 0,
  };
  collectives.set(each.id, found);
  if (found.at) found.at.sends.push(found);
}

// As a map: a name may be one that every object has.
function byName(record) {
  return new Map(Object.entries(record));
}

// The type of a parameter; of a local program that of a rank's part.
function typeOf(entry) {
  return entry.sharding || values.get(entry.node).type;
}

// By the name that a value is called by: of an input the user's.
const byCalled = new Map([...values.values()].map(value => [called(value), value]));

// What a value is called: an input by the user's name.
function called(value) {
  return value.given ? value.given.name : value.name;
}

function toValue(name) {
  const value = values.get(name);
  const entry = value.given && stored.get(value.given.name);
  return entry && entry.node === name ? link('parameter', entry.name) : link('value', name, called(value));
}

// The modules: each with what it computes itself, in order, its children among it, and sums over all that is in it.
const modules = new Map();
const model = moduleAt('');
for (const value of values.values()) if (value.op !== 'placeholder') enter(value);
for (const entry of stored.values()) moduleAt(ownerOf(entry.name)).parameters.push(entry);
sum(model);

function moduleAt(path) {
  if (!modules.has(path)) {
    const parent = path ? moduleAt(path.slice(0, Math.max(0, path.lastIndexOf('.')))) : null;
    const made = {
      path,
      name: path ? path.slice(path.lastIndexOf('.') + 1) : report.model,
      parent,
      parameters: [],
      children: [],
      parts: { forward: [], backward: [], update: [] },
      values: 0,
      bytes: 0,
      sent: {},
    };
    modules.set(path, made);
    if (parent) parent.children.push(made);
  }
  return modules.get(path);
}

function enter(value) {
  const home = moduleAt(value.module);
  home.parts[value.phase].push(value);
  value.home = home;
  if (value.phase !== 'forward') return;
  for (let child = home; child.parent; child = child.parent) {
    // where its first call stands among its parent's
    const beside = child.parent.parts.forward;
    if (child.isPlaced) break;
    beside.push(child);
    child.isPlaced = true;
  }
}

function ownerOf(name) {
  const path = name.slice(0, Math.max(0, name.lastIndexOf('.')));
  return modules.has(path) ? path : '';
}

function sum(module) {
  for (const child of module.children) {
    if (!child.isPlaced) module.parts.backward.push(child);
    sum(child);
  }
  for (const phase of ['forward', 'backward', 'update']) {
    const own = module.parts[phase].filter(each => each.op);
    const sent = own.flatMap(value => value.sends);
    module.values += own.length;
    module.sent[phase] = [...sent, ...module.children.flatMap(child => child.sent[phase])];
  }
  module.values += total(module.children, child => child.values);
  module.bytes = total(module.parameters, entry => entry.bytes) + total(module.children, child => child.bytes);
}

function total(items, of) {
  return items.reduce((found, item) => found + of(item), 0);
}

function isWithin(path, module) {
  return module.path === '' || path === module.path || path.startsWith(`${module.path}.`);
}

// The values that forward brings into a module and takes out of it; parameters apart.
function edges(module) {
  if (module.edges) return module.edges;
  const taken = new Set(),
    given = new Set();
  for (const value of values.values()) {
    if (value.op === 'placeholder' || value.phase !== 'forward' || !isWithin(value.module, module)) continue;
    for (const name of value.operands) {
      const operand = values.get(name);
      const isData = operand.op === 'placeholder' ? operand.given.kind === 'input' : !isWithin(operand.module, module);
      if (isData) taken.add(name);
    }
    const users = value.users.map(name => values.get(name)).filter(user => user.phase === 'forward');
    if (users.some(user => !isWithin(user.module, module)) || !value.users.length) given.add(value.name);
  }
  module.edges = { taken: [...taken], given: [...given] };
  return module.edges;
}

// Collectives by axes: [{axes, key, count, total, kinds}], most bytes first.
function byAxes(found) {
  const groups = new Map();
  for (const each of found) {
    const key = each.axes.join('+');
    const group = groups.get(key) || { key, axes: each.axes, count: 0, total: 0, kinds: {} };
    group.count += each.count;
    group.total += each.total;
    group.kinds[each.kind] = (group.kinds[each.kind] || 0) + each.count;
    groups.set(key, group);
  }
  return [...groups.values()].sort((a, b) => b.total - a.total);
}
