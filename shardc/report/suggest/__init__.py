"""Plans that the search suggests: their JSON records, a table as text, and a page with a picture of the candidates."""
