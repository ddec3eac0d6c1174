class PlacementGroupSchedulingStrategy:
    def __init__(self, placement_group: object, *, placement_group_bundle_index: int):
        pass
