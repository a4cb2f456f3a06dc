const fs = require('fs');
for (;;) fs.writeSync(1, 'flood flood flood\n');
