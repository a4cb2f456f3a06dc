process.stdout.write(process.argv.slice(2).map(a => `[${a}]`).join(''));
