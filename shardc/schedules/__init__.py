"""Pipeline schedules as pure values: orders, proof, simulation, search, picture. Knows no graph."""
