"""Tools of the docs site: ``hooks`` for mkdocs, ``generate`` for tables that the code knows."""
