// The rings of attention and of products: what goes round, and what ranks hold and wait for.

function ringsSection() {
  const columns = [
    { key: 'phase', title: 'phase', value: each => each.phase },
    { key: 'of', title: 'of', value: each => each.of },
    { key: 'axes', title: 'over', value: each => each.axes.join('+'), show: each => axisTags(each.axes) },
    number('count', 'rings', each => each.count),
    number('steps', 'steps', each => each.steps),
    number('wire_bytes', 'wire bytes', each => each.wire_bytes),
    number('held', 'held at a time', each => each.held),
    { key: 'busiest', title: 'busiest / mean', class: 'number', value: each => each.busiest },
    ...(data.rings[0].waited == null
      ? []
      : [duration('computing', 'computing'), duration('sending', 'sending'), duration('waited', 'a rank waits')]),
  ];
  return section(
    'rings',
    'Rings',
    'What goes from rank to rank while each computes with what it has; a rank waits where that takes longer.',
    table('rings', columns, data.rings),
  );
}
