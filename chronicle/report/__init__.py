"""Views of a run's story: terminal graph, Markdown, picture, HTML page. Plot libraries are imported where they are used."""
