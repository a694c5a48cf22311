"""The story drawn: terminal graph, Markdown, pictures, one HTML page. Drawing libraries are imported where they draw."""
