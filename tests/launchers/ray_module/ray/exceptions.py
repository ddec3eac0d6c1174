class RayError(Exception):
    pass
