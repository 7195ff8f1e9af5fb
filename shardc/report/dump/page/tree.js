// The model as a tree of modules, filled as it is opened: what comes in and goes out, what is sent, what is held.

function tree() {
  const root = moduleRow(model, 0);
  const buttons = element(
    'p',
    { class: 'actions' },
    element('button', { type: 'button', onclick: () => openAll(root, true) }, 'Open all modules'),
    element('button', { type: 'button', onclick: () => openAll(root, false) }, 'Close all'),
  );
  const head = element(
    'div',
    { class: 'row head', 'aria-hidden': 'true' },
    ['module, and what forward takes through it', 'sent in forward', 'sent in backward', 'parameters a rank'].map(
      text => element('span', {}, text),
    ),
  );
  root.open = true;
  fillModule(root);
  return section(
    'model',
    'Model',
    'Modules in the order of the program, and on every edge its type and how it is cut: ' +
      '8@dp is a dim of 8 that axis dp cuts, {sum tp} a sum over tp that is still open.',
    buttons,
    element('div', { class: 'tree' }, head, root),
  );
}

function moduleRow(module, depth) {
  const { taken, given } = edges(module);
  const made = element(
    'details',
    {
      class: 'module',
      vars: { '--depth': String(depth) },
      'data-module': module.path,
      ontoggle: event => event.target === made && made.open && fillModule(made),
    },
    summary(
      [
        element('b', {}, module.name),
        link('module', module.path, 'why'),
        element('small', {}, ` ${counted(module.values, 'op')}`),
        flow(taken, given),
      ],
      sentMarks(module.sent.forward),
      sentMarks([...module.sent.backward, ...module.sent.update]),
      held(module),
    ),
  );
  made.module = module;
  made.depth = depth;
  return made;
}

// What is seen of a module, or a part of one, while it is closed: its name, and a cell for each further column.
function summary(name, ...cells) {
  return element('summary', { class: 'row' }, element('span', { class: 'name' }, name), cells);
}

function flow(taken, given) {
  const first = names =>
    names.length
      ? [typeText(values.get(names[0]).type), names.length > 1 ? element('small', {}, ` + ${names.length - 1}`) : '']
      : element('small', {}, 'nothing');
  return element(
    'span',
    { class: 'flow' },
    first(taken),
    element('span', { class: 'arrow', 'aria-label': 'to' }, ' → '),
    first(given.slice(-1)),
  );
}

function sentMarks(found) {
  return element(
    'span',
    { class: 'sent' },
    byAxes(found).map(group =>
      element(
        'span',
        {
          class: `${axisClass(group.axes[0])} chip`,
          title: `${group.count} over ${group.key}, ${grouped(group.total)} bytes`,
        },
        element('i', { vars: { width: `${2 + 34 * Math.sqrt(group.total / Math.max(1, sentBytes))}px` } }),
        `${group.key} ${bytes(group.total)}`,
        element('small', {}, ` ${group.count}×`),
      ),
    ),
  );
}

function held(module) {
  return element('span', { class: 'held amount' }, module.bytes ? bytes(module.bytes) : '');
}

function fillModule(made) {
  if (made.isFilled) return;
  made.isFilled = true;
  const { module, depth } = made,
    { forward, backward, update } = module.parts;
  const inside = element(
    'div',
    { class: 'inside', vars: { '--depth': String(depth + 1) } },
    module.parameters.map(parameterRow),
    update.length ? part('update', update, depth) : null,
    rows(forward, depth),
    backward.length ? part('backward', backward, depth) : null,
  );
  made.append(inside);
}

function rows(items, depth) {
  return items.map(item => (item.op ? valueRow(item) : moduleRow(item, depth + 1)));
}

// What a module computes itself in backward, closed at first.
function part(name, items, depth) {
  const found = items.filter(item => item.op);
  const made = element(
    'details',
    { class: 'part', vars: { '--depth': String(depth + 1) }, ontoggle: event => event.target === made && fillPart() },
    summary(
      [element('i', {}, name), element('small', {}, ` ${counted(found.length, 'op')}`)],
      element('span'),
      sentMarks(found.flatMap(value => value.sends)),
      element('span'),
    ),
  );
  function fillPart() {
    if (made.isFilled) return;
    made.isFilled = true;
    made.append(element('div', { class: 'inside', vars: { '--depth': String(depth + 2) } }, rows(items, depth + 1)));
  }
  made.fillPart = fillPart;
  return made;
}

function parameterRow(entry) {
  return element(
    'div',
    { class: 'leaf parameter' },
    element(
      'span',
      { class: 'result' },
      smallPicture(entry),
      link('parameter', entry.name, entry.name.split('.').pop()),
      ' ',
      typeText(typeOf(entry)),
    ),
    element('span', { class: 'amount' }, bytes(entry.bytes)),
  );
}

// A value, and below it every edge that comes in.
function valueRow(value) {
  const sent = value.sends.length
    ? element(
        'span',
        { class: 'sends' },
        value.sends.map(each => link('collective', each.id, sentMarks([each]))),
      )
    : null;
  return element(
    'div',
    {
      class: `leaf value ${value.sends.length ? `sending ${axisClass(value.sends[0].axes[0])}` : ''}`,
      'data-value': value.name,
    },
    element(
      'span',
      { class: 'result' },
      link('value', value.name),
      ' ',
      element('span', { class: 'op' }, value.op),
      ' ',
      typeText(value.type),
    ),
    sent,
    element(
      'span',
      { class: 'edges' },
      value.operands.map(name =>
        element('span', { class: 'edge' }, '← ', toValue(name), ' ', typeText(values.get(name).type)),
      ),
    ),
  );
}

function openAll(root, isOpen) {
  for (const made of [root, ...root.querySelectorAll('details.module')]) {
    if (isOpen) fillModule(made);
    made.open = isOpen || made === root;
    if (isOpen) made.querySelectorAll(':scope > .inside > details.module').forEach(child => openAll(child, true));
  }
}

// Open all that a value or module is in, and show it.
function reveal(path, name) {
  const above = [];
  for (let at = modules.get(path); at; at = at.parent) above.unshift(at.path);
  let made = null;
  for (const each of above) {
    made = [...document.querySelectorAll('details.module')].find(found => found.dataset.module === each);
    if (!made) return;
    fillModule(made);
    made.open = true;
    made.querySelectorAll(':scope > .inside > details.part').forEach(found => {
      found.fillPart();
    });
  }
  const row = name && [...made.querySelectorAll('.leaf.value')].find(found => found.dataset.value === name);
  if (row && row.closest('details.part')) row.closest('details.part').open = true;
  document.querySelectorAll('.found').forEach(found => found.classList.remove('found'));
  (row || made.firstChild).classList.add('found');
  const show = () => (row || made.firstChild).scrollIntoView({ block: 'center' });
  show();
  requestAnimationFrame(() => requestAnimationFrame(show)); // again, once what is in sight has its true height
}
