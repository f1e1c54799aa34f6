"""kgen verify."""
