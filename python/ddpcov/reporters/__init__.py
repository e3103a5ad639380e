import json


class Options:
    def __init__(self, **k):
        pass


class J:
    def __init__(self, o):
        pass

    def render(self, r, s):
        json.dump(r.to_dict(), s)


FORMATS = {"text": J, "json": J, "markdown": J}
