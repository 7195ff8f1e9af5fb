"""The words of the compiler: mesh, P, sharding, cut, rule, windows, machine, errors. Knows no graph."""
