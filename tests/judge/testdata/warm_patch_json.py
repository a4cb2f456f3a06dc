import json
json.dumps = lambda x: "patched"
print(json.dumps(1))
