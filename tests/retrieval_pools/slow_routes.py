"""The slow reference of `Router.routes`: the routing rule for one entity at a time."""

from laserbatch.retrieval_pools.routing.router import GLOBAL_GROUP, Route, random_group


def route(router, entity_id, attributes, num_interactions):
    """The route of one entity, from its attribute values by column and its current number of interactions."""
    scheme = router.settings.scheme
    if scheme == "random":
        return Route(random_group(entity_id, router.num_groups, router.seed), "random")
    known = router.collaborative
    group = dict(zip(known.ids.to_pylist(), known.groups.tolist(), strict=True)).get(entity_id)
    is_warm = group is not None and num_interactions >= router.settings.min_interactions
    if is_warm and scheme in ("router", "collaborative"):
        return Route(f"collaborative/{group}", "collaborative")
    if scheme in ("collaborative", "global"):
        return Route(GLOBAL_GROUP, "global")
    return Route(router.attributes.group_of(attributes), "attribute")
