"""Transform any module's graph: try it, capture it, change its precision. It knows no particular model."""
