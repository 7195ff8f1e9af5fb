// The search box: modules, parameters, collectives, annotations and values whose names hold what is typed.

const MOST_FOUND = 40;

const names = [
  ...[...modules.keys()].filter(Boolean).map(name => ({ kind: 'module', name })),
  ...[...stored.keys()].map(name => ({ kind: 'parameter', name })),
  ...[...collectives.keys()].map(name => ({ kind: 'collective', name })),
  ...report.annotations.map(name => ({ kind: 'annotation', name })),
  ...[...values.values()]
    .filter(value => !collectives.has(value.name) && !(value.given && stored.has(value.given.name)))
    .map(value => ({ kind: 'value', name: value.name, also: `${value.op} ${value.source}` })),
];

function matching(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const found = names.filter(({ kind, name, also }) =>
    words.every(word => `${kind} ${name} ${also || ''}`.toLowerCase().includes(word)),
  );
  const rank = ({ name }) =>
    name.toLowerCase() === text.toLowerCase() ? 0 : name.toLowerCase().startsWith(words[0]) ? 1 : 2;
  return found
    .map((each, i) => [rank(each), i, each])
    .sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map(each => each[2]);
}

function searching() {
  const box = document.getElementById('search'),
    list = document.getElementById('found');
  let at = -1;
  function show() {
    const found = matching(box.value);
    at = -1;
    list.replaceChildren(
      ...found
        .slice(0, MOST_FOUND)
        .map(({ kind, name }, i) =>
          element(
            'li',
            { role: 'option', id: `found-${i}`, 'aria-selected': 'false' },
            element(
              'a',
              { href: address(kind, name), tabindex: '-1', onclick: hide },
              element('small', {}, kind),
              ' ',
              name,
            ),
          ),
        ),
      ...(found.length > MOST_FOUND ? [element('li', { class: 'hint' }, `and ${found.length - MOST_FOUND} more`)] : []),
      ...(box.value.trim() && !found.length ? [element('li', { class: 'hint' }, 'Nothing has that name.')] : []),
    );
    open(Boolean(box.value.trim()));
  }
  function open(isOpen) {
    list.hidden = !isOpen;
    box.setAttribute('aria-expanded', String(isOpen));
    if (!isOpen) box.removeAttribute('aria-activedescendant');
  }
  function hide() {
    open(false);
  }
  function move(by) {
    const options = [...list.querySelectorAll('[role=option]')];
    if (!options.length) return;
    at = (at + by + options.length) % options.length;
    options.forEach((option, i) => option.setAttribute('aria-selected', String(i === at)));
    options[at].scrollIntoView({ block: 'nearest' });
    box.setAttribute('aria-activedescendant', options[at].id);
  }
  function choose() {
    const options = [...list.querySelectorAll('[role=option] a')];
    if (!options.length) return;
    location.hash = options[Math.max(0, at)].getAttribute('href');
    hide();
  }
  const keys = { ArrowDown: () => move(1), ArrowUp: () => move(-1), Enter: choose, Escape: hide };
  box.addEventListener('input', show);
  box.addEventListener('focus', () => box.value.trim() && show());
  box.addEventListener('keydown', event => {
    if (keys[event.key]) {
      keys[event.key]();
      event.preventDefault();
      event.stopPropagation();
    }
  });
  document.addEventListener('click', event => {
    if (!event.target.closest('.search')) hide();
  });
  document.addEventListener('keydown', event => {
    if (event.key === '/' && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) {
      box.focus();
      event.preventDefault();
    }
    if (event.key === 'Escape' && !inspector.hidden) close();
  });
}
