"""Generated worlds of made-up people, companies, cities and perfumes: what only searching can answer."""
