"""The watch on one engine: joins the packages below, with its threads, its run folder and OTLP."""
